"""Batches from a user's source of data, where a step wants them."""
