"""Simulated clusters with tree routing and transactions over it: what clients do, what goes wrong, what must hold."""
