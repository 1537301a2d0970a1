"""A broker between its links: which way a message goes, which links want an event, which sites are connected.

What concerns event types whose rendezvous is this broker goes on to `tops.core.coordinator`.
"""
