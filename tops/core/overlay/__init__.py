"""What every kind of routing stands on: the topology of the overlay, and the index that matches events with filters."""
