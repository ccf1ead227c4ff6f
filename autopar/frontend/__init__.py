"""The user's function: its arguments, its trace, and what its leaves are for."""
