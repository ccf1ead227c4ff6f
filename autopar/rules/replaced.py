"""Scatters that replace: which updates of a position stay, seen from one shard.

Of several updates of one position XLA keeps the last one on CPUs, and some one on other
devices. A shard of what is scattered into sees all updates in order and drops those of
others. Shards that hold some of the updates each number all of them, scatter the
numbers, and keep an own update only where its number stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from ..graph.op_graph import Operator
from .base import Shard, bind_params

OWN = "own"  # How factors are called that split updates, but not their indices.


def splits_updates(shard: Shard) -> bool:
    """Whether this device holds some of the updates, and the indices of all."""
    return any(factor.name.startswith(OWN) for factor in shard.factors)


def replace_held(
    op: Operator, operands: Sequence[jax.Array], is_held: jax.Array, shard: Shard
) -> jax.Array:
    """Scatter the updates whose windows this device holds.

    Args:
      op: a scatter.
      operands: what is scattered into, indices within it, and all updates.
      is_held: for every index vector, whether it lies there by itself.
      shard: where this device is.
    """
    del shard
    operand, indices, updates = operands
    if prod(is_held.shape) == 1:
        # XLA's CPU compiler does not always drop the only index of a scatter.
        (replaced,) = _bound(op, operand, indices, updates)
        return jnp.where(is_held.reshape(()), replaced, operand)
    return _bound(op, operand, _dropping(op, operand, indices, is_held), updates)[0]


def replace_by_own(
    op: Operator, operands: Sequence[jax.Array], is_held: jax.Array, shard: Shard
) -> jax.Array:
    """This device's part of a sum: own updates that stay, and zeros where others do.

    Args are those of `replace_held`, but updates are this device's own.
    """
    operand, indices, updates = operands
    numbers = op.params["dimension_numbers"]
    indexed = {*numbers.scatter_dims_to_operand_dims, *numbers.operand_batching_dims}
    rows = [size if dim in indexed else 1 for dim, size in enumerate(operand.shape)]
    windows = numbers.update_window_dims
    index_dims = [dim for dim in range(updates.ndim) if dim not in windows]
    order = lax.iota(jnp.int32, prod(is_held.shape)).reshape(is_held.shape)
    all_shape = list(updates.shape)
    for dim in range(updates.ndim):
        all_shape[dim] = 1 if dim in windows else order.shape[index_dims.index(dim)]
    last = lax.scatter_max(
        jnp.full(rows, -1, jnp.int32),
        indices,
        jnp.where(is_held, order, -1).reshape(all_shape),
        numbers,
        mode=GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    for place, dim in enumerate(index_dims):
        count = updates.shape[dim]
        if count == order.shape[place]:
            continue
        start = shard.offset(shard.operand_specs[2], dim, count)
        order, is_held, indices = (
            lax.dynamic_slice_in_dim(each, start, count, place)
            for each in (order, is_held, indices)
        )
    stayed = lax.gather(
        last,
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=windows,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        ),
        [1] * operand.ndim,
        mode=GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    stays = is_held & (stayed.reshape(order.shape) == order)
    kept = jnp.where(last < 0, operand, jnp.zeros((), operand.dtype))
    return replace_held(op, (kept, indices, updates), stays, shard)


def _dropping(
    op: Operator, operand: jax.Array, indices: jax.Array, is_kept: jax.Array
) -> jax.Array:
    """The indices, those out of range that are not kept."""
    dims = op.params["dimension_numbers"].scatter_dims_to_operand_dims
    beyond = jnp.array([operand.shape[dim] for dim in dims], indices.dtype)
    return jnp.where(is_kept[..., None], indices, beyond)


def _bound(op: Operator, *operands: Any) -> Sequence[Any]:
    return bind_params(
        op,
        operands,
        mode=GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )
