"""The high half of an integer product, from products of half as many bits.

XLA compiles its own operator for it on one device only: a program for several fails
with "Unable to convert MHLO to StableHLO".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Operator
from .base import Factor, Shard, register
from .elementwise import dim_factors


def bind_high_product(
    op: Operator, operands: Sequence[Any], shard: Shard
) -> list[jax.Array]:
    del op, shard
    return [high_product(*operands)]


@register("mulhi", bind=bind_high_product)
def mulhi(op: Operator) -> list[Factor]:
    return dim_factors(op)


def high_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """The upper bits of `x * y`, which has twice the bits of each.

    A negative number is read as unsigned first, 2**bits too large.
    """
    dtype = np.dtype(x.dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    high = unsigned_high(lax.convert_element_type(x, unsigned), y.astype(unsigned))
    high = lax.convert_element_type(high, dtype)
    if np.issubdtype(dtype, np.signedinteger):
        zero = jnp.zeros((), dtype)
        high = high - jnp.where(x < 0, y, zero) - jnp.where(y < 0, x, zero)
    return high


def unsigned_high(x: jax.Array, y: jax.Array | np.unsignedinteger) -> jax.Array:
    """The upper half of the bits of `x * y`, both unsigned and of one dtype."""
    half = x.dtype.type(4 * x.dtype.itemsize)
    mask = x.dtype.type(2 ** int(half) - 1)
    x_high, x_low, y_high, y_low = x >> half, x & mask, y >> half, y & mask
    left, right = x_high * y_low, x_low * y_high
    middle = ((x_low * y_low) >> half) + (left & mask) + (right & mask)
    return x_high * y_high + (left >> half) + (right >> half) + (middle >> half)
