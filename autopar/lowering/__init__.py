"""Turns a plan into explicit SPMD programs."""
