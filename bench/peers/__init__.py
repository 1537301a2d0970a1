"""The systems that users would otherwise choose, each behind the port of `bench.systems`, durable and on loopback."""
