"""Values of the forward pass that the backward pass makes again instead of keeping."""
