"""PostgreSQL's wire protocol in front of a replica set: for applications that speak PostgreSQL.

May import the client side of replication; nothing imports it but the command line. A message comes in at
`client_session`, is decoded by `messages`, classified by its text, and then either passes to a session of the replica's
database (`backend`), whose bytes go back as they are, or is written through the set (`writing`).
"""
