"""Compilers for devices that are not here."""
