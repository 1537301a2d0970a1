"""A replica: its agent, the database behind it, copies for newcomers.

`start` brings it into the set, `apply` carries out the log, `origin` executes statements once.
"""
