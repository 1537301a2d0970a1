"""Requests from clients to replicas and their responses: the types, who may send which, and how they travel."""
