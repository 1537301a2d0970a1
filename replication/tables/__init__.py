"""Tables of a replica as a comparison sees them: schema, key ranges, canonical text, checksums.

Used by the start of a set and by divergence checks.
"""
