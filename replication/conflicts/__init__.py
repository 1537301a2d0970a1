"""What happens when two sites change a row at once: clocks, ranks, resolvers, and the record of every conflict."""
