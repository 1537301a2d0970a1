"""Databases as transactional resources, one file per database, behind the same port."""

from adapters.embedded_postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres"]
