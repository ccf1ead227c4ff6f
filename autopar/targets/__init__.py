"""Compilers of devices that are not here: what they compile for, and how it is asked."""
