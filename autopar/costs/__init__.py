"""What compute, collectives, resharding and memory cost."""
