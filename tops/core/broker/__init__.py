"""A broker between its links: which way a message goes, which links want an event, which sites are connected.

Messages of links come in; messages to links and effects of the coordinator go out. What concerns event types whose
rendezvous is this broker goes on to `tops.core.coordinator`. The package imports that, `tops.model` and
`tops.protocol`.
"""
