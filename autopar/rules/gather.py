"""Gather: the indexed dims may be split too, each shard giving the rows that it holds.

Every dim of the result comes from the indices or from the operand's windows, and is
parallel. A dim of the operand that is indexed one position at a time (the vocabulary of
an embedding, the classes of a cross-entropy) is split the way Megatron-LM splits its
vocabulary (Shoeybi et al. 2019, section 3): rows of other shards are zero, and the
result is a pending sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM
from .base import Factor, Shard, bind_params, pending_sums, register
from .indices import (
    MAX_INDEXED_SIZE,
    clamp_indices,
    is_unchanged,
    shift_indices,
    split_among,
    widen_indices,
)


def bind_gather(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Gather from a shard. Windows that were whole are as long as the shard's dim."""
    shape, local_shape = op.operand_types[0].shape, shard.operand_shape(op, 0)
    slice_sizes = tuple(
        local_shape[dim] if size == shape[dim] else size
        for dim, size in enumerate(op.params["slice_sizes"])
    )
    split_dims = split_among(_vocabulary_dims(op), shard.operand_specs[0])
    if split_dims or (SUM in shard.result_specs[0] and _fills(op)):
        return [_gather_held(op, operands, shard, slice_sizes, split_dims)]
    operand, indices = operands
    return bind_params(op, (operand, widen_indices(indices)), slice_sizes=slice_sizes)


@register("gather", bind=bind_gather)
def gather(op: Operator) -> list[Factor]:
    numbers = op.params["dimension_numbers"]
    operand, indices = op.operand_types
    result = op.result_types[0]
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window_dims = [dim for dim in range(operand.rank) if dim not in taken]
    batched_dims = numbers.start_indices_batching_dims
    batching = dict(zip(batched_dims, numbers.operand_batching_dims, strict=True))
    factors = []
    for index_dim, result_dim in enumerate(_index_dims_of_result(op)):
        states = (batching.get(index_dim, REPLICATED), index_dim)
        size = indices.shape[index_dim]
        factors.append(Factor(f"i{result_dim}", states, (result_dim,), size))
    for dim, result_dim in zip(window_dims, numbers.offset_dims, strict=True):
        if op.params["slice_sizes"][dim] == operand.shape[dim]:
            states = (dim, REPLICATED)
            factors.append(Factor(f"w{dim}", states, (result_dim,), operand.shape[dim]))
    if jnp.issubdtype(result.dtype, jnp.number):
        for dim in _vocabulary_dims(op):
            states = (dim, REPLICATED)
            size = operand.shape[dim]
            factors.append(Factor(f"v{dim}", states, (SUM,), size, is_positional=True))
    return [*factors, *pending_sums(op, (0,))]


def _vocabulary_dims(op: Operator) -> list[int]:
    """Dims of the operand that are indexed one position at a time."""
    shape, sizes = op.operand_types[0].shape, op.params["slice_sizes"]
    return [
        dim
        for dim in op.params["dimension_numbers"].start_index_map
        if sizes[dim] == 1 and 1 < shape[dim] <= MAX_INDEXED_SIZE
    ]


def _index_dims_of_result(op: Operator) -> tuple[int, ...]:
    """The result dims that come from the indices' dims, in order."""
    offset_dims = op.params["dimension_numbers"].offset_dims
    return tuple(d for d in range(op.result_types[0].rank) if d not in offset_dims)


def _fills(op: Operator) -> bool:
    """Whether rows out of range hold a value that a sum may count only once."""
    fill_value = op.params["fill_value"]
    is_fill = op.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return is_fill and not np.all(np.asarray(fill_value) == 0)


def _gather_held(
    op: Operator,
    operands: Sequence[Any],
    shard: Shard,
    slice_sizes: tuple[int, ...],
    split_dims: tuple[int, ...],
) -> jax.Array:
    """The rows that this device holds, zeros elsewhere; it may also be the one to fill.

    Indices are first clamped to the whole operand, as XLA does in every mode but
    FILL_OR_DROP, so that each row is held by exactly one shard.
    """
    operand, indices = operands
    shape, spec = op.operand_types[0].shape, shard.operand_specs[0]
    indexed_dims = op.params["dimension_numbers"].start_index_map
    bounds = [shape[dim] - op.params["slice_sizes"][dim] for dim in indexed_dims]
    wanted = clamp_indices(indices, bounds, slack=1)
    in_range = clamp_indices(wanted, bounds, slack=0)
    shifted = shift_indices(
        in_range, indexed_dims, split_dims, spec, operand.shape, shard
    )
    local_bounds = [operand.shape[dim] - slice_sizes[dim] for dim in indexed_dims]
    local = clamp_indices(shifted, local_bounds, slack=0)
    (rows,) = bind_params(
        op,
        (operand, local),
        slice_sizes=slice_sizes,
        mode=GatherScatterMode.PROMISE_IN_BOUNDS,
        fill_value=None,
        indices_are_sorted=False,
        unique_indices=False,
    )

    def keep(mask: jax.Array, otherwise: Any) -> jax.Array:
        dims = _index_dims_of_result(op)
        spread = lax.broadcast_in_dim(mask, rows.shape, dims)
        return lax.select(spread, rows, lax.broadcast(otherwise, rows.shape))

    zero = jnp.zeros((), rows.dtype)
    rows = keep(is_unchanged(shifted, local), zero)
    if op.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        pending = [a for a, state in enumerate(shard.result_specs[0]) if state == SUM]
        fill_value = jnp.asarray(op.params["fill_value"], rows.dtype)
        fill = lax.select(shard.is_first(pending), fill_value, zero)
        rows = keep(is_unchanged(wanted, in_range), fill)
    return rows
