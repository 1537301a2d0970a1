"""Replica sets on top of TOPS: who takes part inside a transaction, and who follows after."""
