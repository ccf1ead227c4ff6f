"""How tensors lie on a mesh, and the collectives between two such ways."""
