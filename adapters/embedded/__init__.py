"""Real PostgreSQL servers from a wheel: their programs, their data directories, their ports."""
