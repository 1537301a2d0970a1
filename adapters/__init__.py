"""Databases as transactional resources, one package per database, behind the same port."""

from adapters.embedded_postgres import EmbeddedPostgres
from adapters.postgres import PostgresAdapter
from adapters.sqlite import SqliteAdapter

__all__ = ["EmbeddedPostgres", "PostgresAdapter", "SqliteAdapter"]
