"""Databases as transactional resources, one file or package per database, behind the same port."""

from adapters.embedded_postgres import EmbeddedPostgres
from adapters.postgres import PostgresAdapter

__all__ = ["EmbeddedPostgres", "PostgresAdapter"]
