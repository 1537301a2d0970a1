"""A replica's end of direct connections: what one connection carries, and quick reads.

May import what the agent imports, not the agent. A request comes in over a connection, goes to the same place as one
that came through brokers (`Responder`), or as a quick read to the database's quick sessions, and its response goes back
over the connection.
"""
