"""Cutting arrays apart and joining them: the dims that stay whole are parallel.

All of these are linear, so pending sums pass; joined arrays must be pending together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.op_graph import Operator, TensorType, is_zero
from .base import Factor, Shard, bind_params, pending_sums, register, shared_dims
from .reduce import kept_dims, whole_dims


def _bind_slice(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Dims that are split are taken whole, so their limit is the local size."""
    limits = list(op.params["limit_indices"])
    for dim, size in enumerate(shard.operand_shape(op, 0)):
        if size != op.operand_types[0].shape[dim]:
            limits[dim] = size
    return bind_params(op, operands, limit_indices=tuple(limits))


@register("slice", bind=_bind_slice)
def slice_(op: Operator) -> list[Factor]:
    sizes = zip(op.operand_types[0].shape, op.result_types[0].shape, strict=True)
    # A result as large as its operand starts at 0 and skips nothing.
    cut = {dim for dim, (whole, taken) in enumerate(sizes) if whole != taken}
    return whole_dims(op, cut) + pending_sums(op, (0,))


@register("split")
def split(op: Operator) -> list[Factor]:
    return whole_dims(op, (op.params["axis"],)) + pending_sums(op, (0,))


@register("concatenate")
def concatenate(op: Operator) -> list[Factor]:
    every = tuple(range(len(op.operands)))
    return whole_dims(op, (op.params["dimension"],)) + pending_sums(op, every)


@register("stack")
def stack(op: Operator) -> list[Factor]:
    axis, every = op.params["axis"], tuple(range(len(op.operands)))
    dims = ((dim, dim + (dim >= axis)) for dim in range(op.operand_types[0].rank))
    return shared_dims(op, dims) + pending_sums(op, every)


@register("unstack")
def unstack(op: Operator) -> list[Factor]:
    return kept_dims(op, (op.params["axis"],)) + pending_sums(op, (0,))


@register("pad")
def pad(op: Operator) -> list[Factor]:
    config = enumerate(op.params["padding_config"])
    dims = ((dim, dim) for dim, each in config if tuple(each) == (0, 0, 0))
    return shared_dims(op, dims, num_whole=1) + pending_sums(
        op, (0,) if is_zero(op.operands[1]) else (0, 1)
    )


def _bind_dynamic_slice(
    op: Operator, operands: Sequence[Any], shard: Shard
) -> list[Any]:
    array, *starts = operands
    sizes = shard.result_shape(op)
    clamped = _clamp_starts(starts, array.shape, sizes)
    return bind_params(op, [array, *clamped], slice_sizes=sizes)


def _bind_dynamic_update_slice(
    op: Operator, operands: Sequence[Any], shard: Shard
) -> list[Any]:
    del shard
    array, update, *starts = operands
    clamped = _clamp_starts(starts, array.shape, update.shape)
    return bind_params(op, [array, update, *clamped])


def _clamp_starts(
    starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]
) -> list[jax.Array]:
    """Start indices as XLA clamps them, but before it sees them.

    Where a shard is cut out of a slice, XLA adds the two starts and clamps their sum,
    which is another element if the first start was out of range.
    """
    clamped = []
    for start, whole, size in zip(starts, shape, sizes, strict=True):
        index = jnp.asarray(start)
        greatest = min(whole - size, jnp.iinfo(index.dtype).max)
        clamped.append(jnp.clip(index, 0, greatest).astype(index.dtype))
    return clamped


@register("dynamic_slice", bind=_bind_dynamic_slice)
def dynamic_slice(op: Operator) -> list[Factor]:
    """Start indices are whole; where a dim is taken whole, clamping makes them 0."""
    return _taken_whole(op, op.result_types[0], 1) + pending_sums(op, (0,))


@register("dynamic_update_slice", bind=_bind_dynamic_update_slice)
def dynamic_update_slice(op: Operator) -> list[Factor]:
    """Like `dynamic_slice`, with the update as the part that is taken."""
    return _taken_whole(op, op.operand_types[1], 2) + pending_sums(op, (0, 1))


def _taken_whole(op: Operator, part: TensorType, num_arrays: int) -> list[Factor]:
    """The dims of which a part is all; what is behind the arrays are start indices."""
    sizes = enumerate(zip(op.operand_types[0].shape, part.shape, strict=True))
    dims = ((dim, dim) for dim, (whole, taken) in sizes if whole == taken)
    return shared_dims(op, dims, num_whole=len(op.operands) - num_arrays)
