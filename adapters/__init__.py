"""Databases as transactional resources, one package per database, behind the same port."""

from adapters.embedded.servers import EmbeddedPostgres
from adapters.postgres import Logins, PostgresAdapter, provision
from adapters.sqlite import SqliteAdapter

__all__ = ["EmbeddedPostgres", "Logins", "PostgresAdapter", "SqliteAdapter", "provision"]
