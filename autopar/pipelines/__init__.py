"""A step cut into stages, each on a submesh of its own."""
