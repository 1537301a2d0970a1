"""Reading replicas for a check: rows as canonical text, the Spark data source, snapshots, the Spark session."""
