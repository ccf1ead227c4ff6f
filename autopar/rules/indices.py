"""Index vectors of gather and scatter, as seen from one shard of what they index."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..sharding.spec import Spec, axes_of_dim
from .base import Shard

# Shards count positions in int32, so longer dims are not split by position.
MAX_INDEXED_SIZE = 2**31 - 2


def clamp_indices(indices: jax.Array, bounds: Sequence[int], slack: int) -> jax.Array:
    """Each component clamped to `-slack <= index <= bound + slack`, as int32.

    Args:
      indices: index vectors of any integer dtype, one component for each bound.
      bounds: the greatest index in range of each component.
      slack: 0 pulls every index into range; 1 leaves those out of range out of it.
    """
    limits = jnp.iinfo(indices.dtype)
    least = indices.dtype.type(max(-slack, limits.min))
    greatest = np.array([min(b + slack, limits.max) for b in bounds], indices.dtype)
    at_most = lax.broadcast_in_dim(greatest, indices.shape, (indices.ndim - 1,))
    clamped = lax.max(lax.min(indices, at_most), lax.full_like(indices, least))
    return lax.convert_element_type(clamped, jnp.int32)


def widen_indices(indices: jax.Array) -> jax.Array:
    """Indices of at least 32 bits: XLA loses the only row of a scatter by int8."""
    if indices.dtype.itemsize >= 4:
        return indices
    return lax.convert_element_type(indices, jnp.int32)


def shift_indices(
    indices: jax.Array,
    indexed_dims: Sequence[int],
    split_dims: Sequence[int],
    spec: Spec,
    shape: Sequence[int],
    shard: Shard,
) -> jax.Array:
    """Indices counted from the start of this device's shard.

    Args:
      indices: int32 index vectors, one component for each of `indexed_dims`.
      indexed_dims: the dims of the indexed tensor that the components are for.
      split_dims: those of them that are split by position.
      spec: of the indexed tensor.
      shape: local shape of the indexed tensor.
      shard: where this device is.
    """
    starts = [
        shard.offset(spec, dim, shape[dim]) if dim in split_dims else jnp.int32(0)
        for dim in indexed_dims
    ]
    shift = lax.broadcast_in_dim(jnp.stack(starts), indices.shape, (indices.ndim - 1,))
    return indices - shift


def is_unchanged(before: jax.Array, after: jax.Array) -> jax.Array:
    """For every index vector, whether all its components are the same in both."""
    return lax.reduce_and(before == after, axes=(before.ndim - 1,))


def split_among(dims: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """Those of `dims` that some mesh axis splits."""
    return tuple(dim for dim in dims if axes_of_dim(spec, dim))
