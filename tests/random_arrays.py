"""Numbers for tests, drawn by numpy: jax compiles several programs for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal float32 numbers."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(scale * numbers, jnp.float32)


def integers(seed: int, *shape: int, low: int = 0, high: int) -> jax.Array:
    """Uniform int32 numbers in `[low, high)`."""
    numbers = np.random.default_rng(seed).integers(low, high, shape)
    return jnp.asarray(numbers, jnp.int32)
