"""The log of one durable event type as data: indexes, entries, digests, and how far each subscriber has come."""
