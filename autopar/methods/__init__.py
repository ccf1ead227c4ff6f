"""Kinds of parallelism by name, as what they leave of the sharding problem."""
