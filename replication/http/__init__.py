"""HTTP of the replication layer: health and metrics of an agent, replica sets at a broker."""
