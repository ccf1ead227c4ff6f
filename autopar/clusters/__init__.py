"""Machines: their devices and links, by preset, file or measurement."""
