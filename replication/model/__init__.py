"""What a replica set is and what a write to it is: configuration, events, values, the rows that a change touches."""
