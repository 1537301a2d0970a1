"""Simulated ordering domains: machines of brokers and sites, with reordering, crashes and changing subscriptions."""
