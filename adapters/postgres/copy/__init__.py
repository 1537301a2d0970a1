"""Copies of a database: schema by `pg_dump`, rows in PostgreSQL's own formats."""
