"""PostgreSQL as a language: literals, row changes as SQL, the catalogue, error codes, logins, the schema `tops`.

Imports no other part of the adapter.
"""
