"""The operator graph of one traced function, and what is read off it."""
