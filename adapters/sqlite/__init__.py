"""SQLite as a compensatable resource: `adapter` is the port, `work` runs members, `undo` is the way back."""

from adapters.sqlite.adapter import SqliteAdapter

__all__ = ["SqliteAdapter"]
