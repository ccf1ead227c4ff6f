"""Runs lowered programs, in this process or on the hosts of a cluster."""
