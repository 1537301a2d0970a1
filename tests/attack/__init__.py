"""Attacks on running clusters: each is rejected, nothing has changed, and nobody else was disturbed."""
