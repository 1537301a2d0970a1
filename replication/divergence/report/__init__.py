"""A finished check for people and for programs: terminal, JSON, Parquet, and one self-contained HTML page."""
