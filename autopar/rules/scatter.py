"""Scatters: each shard applies the updates that fall into it, or adds a share of them.

The gradient of an embedding is a scatter-add: over the token dims it is a reduction,
over the vocabulary it is parallel, each shard dropping the rows of the others. Of what
replaces, XLA keeps the last update of a position on CPUs, and some one on other
devices: so every shard sees all updates, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from ..graph.op_graph import Operator
from ..sharding.spec import MAX, MIN, REPLICATED, SUM, State
from .base import (
    Factor,
    Shard,
    bind_params,
    neutral,
    pending_sums,
    register,
)
from .indices import (
    MAX_INDEXED_SIZE,
    clamp_indices,
    is_unchanged,
    shift_indices,
    split_among,
    widen_indices,
)

# State of the operand, then of the result, where every shard applies some updates.
_SPLIT_UPDATES: dict[str, tuple[State, State]] = {
    "scatter-add": (SUM, SUM),
    "scatter-sub": (SUM, SUM),
    "scatter-max": (REPLICATED, MAX),
    "scatter-min": (REPLICATED, MIN),
}

# Of each of these there is an update that changes nothing.
ACCUMULATING = (*_SPLIT_UPDATES, "scatter-mul")


def bind_scatter(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Scatter into a shard; updates of others are made harmless, or are dropped."""
    operand, indices, updates = operands
    spec = shard.operand_specs[0]
    split_dims = split_among(_vocabulary_dims(op), spec)
    if not split_dims:
        return bind_params(op, (operand, widen_indices(indices), updates))
    shape, windows = op.operand_types[0].shape, _window_sizes(op)
    indexed_dims = op.params["dimension_numbers"].scatter_dims_to_operand_dims
    bounds = [shape[dim] - windows[dim] for dim in indexed_dims]
    slack = 0 if op.params["mode"] == GatherScatterMode.CLIP else 1
    wanted = clamp_indices(indices, bounds, slack)
    local = shift_indices(wanted, indexed_dims, split_dims, spec, operand.shape, shard)
    sizes = [max(operand.shape[dim] - windows[dim], 0) for dim in indexed_dims]
    inside = jnp.clip(local, 0, jnp.array(sizes, local.dtype))
    is_held = is_unchanged(local, inside)
    if op.kind == "scatter":
        return [_replaced(op, operand, inside, updates, is_held)]
    updates = _without_dropped(op, updates, is_held)
    # Clamping the components one by one keeps only scalars in order.
    is_sorted = op.params["indices_are_sorted"] and len(indexed_dims) == 1
    return bind_params(
        op,
        (operand, inside, updates),
        mode=GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=is_sorted,
        unique_indices=False,  # what is dropped lands on what is kept
    )


def _replaced(
    op: Operator,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    is_held: jax.Array,
) -> jax.Array:
    """A shard with the updates whose windows it holds by themselves."""
    dims = op.params["dimension_numbers"].scatter_dims_to_operand_dims
    beyond = jnp.array([operand.shape[dim] for dim in dims], indices.dtype)
    is_one = prod(is_held.shape) == 1
    if not is_one:
        indices = jnp.where(is_held[..., None], indices, beyond)
    (replaced,) = bind_params(
        op,
        (operand, indices, updates),
        mode=GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )
    # XLA's CPU compiler does not always drop the only index of a scatter.
    return jnp.where(is_held.reshape(()), replaced, operand) if is_one else replaced


def _without_dropped(op: Operator, updates: jax.Array, held: jax.Array) -> jax.Array:
    """Updates that change nothing where their window is another shard's.

    XLA's CPU compiler does not always drop the only index of a scatter into a slice, so
    indices are kept in range and what would be dropped is made harmless.
    """
    windows = set(op.params["dimension_numbers"].update_window_dims)
    dims = [dim for dim in range(updates.ndim) if dim not in windows]
    keep = lax.broadcast_in_dim(held, updates.shape, dims)
    reduction = _SPLIT_UPDATES.get(op.kind)
    harmless = neutral(reduction[1], updates.dtype) if reduction else 1
    return jnp.where(keep, updates, np.asarray(harmless, updates.dtype))


@register(
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    bind=bind_scatter,
)
def scatter(op: Operator) -> list[Factor]:
    return [
        *_index_factors(op),
        *_window_factors(op),
        *_vocabulary_factors(op),
        *_linear_factors(op),
    ]


def _index_factors(op: Operator) -> list[Factor]:
    """Dims that the updates share with the indices: batching dims, else reductions."""
    numbers = op.params["dimension_numbers"]
    operand, _, updates = op.operand_types
    batched_dims = numbers.scatter_indices_batching_dims
    batching = dict(zip(batched_dims, numbers.operand_batching_dims, strict=True))
    index_dims = [d for d in range(updates.rank) if d not in numbers.update_window_dims]
    factors = []
    for index_dim, update_dim in enumerate(index_dims):
        if index_dim in batching:
            dim = batching[index_dim]
            states, result = (dim, index_dim, update_dim), dim
        elif op.kind in _SPLIT_UPDATES and _is_reducible(op):
            before, result = _SPLIT_UPDATES[op.kind]
            states = (before, index_dim, update_dim)
        else:
            continue
        size = updates.shape[update_dim]
        factors.append(Factor(f"i{update_dim}", states, (result,), size))
    return factors


def _window_factors(op: Operator) -> list[Factor]:
    """Dims of the operand that every update covers whole."""
    shape, windows = op.operand_types[0].shape, _window_sizes(op)
    return [
        Factor(f"w{dim}", (dim, REPLICATED, update_dim), (dim,), shape[dim])
        for dim, update_dim in _window_dims(op).items()
        if windows[dim] == shape[dim]
    ]


def _vocabulary_factors(op: Operator) -> list[Factor]:
    if op.kind in ACCUMULATING and not _is_reducible(op):
        return []  # there is no update that changes nothing
    shape = op.operand_types[0].shape
    return [
        Factor(
            f"v{dim}",
            (dim, REPLICATED, REPLICATED),
            (dim,),
            shape[dim],
            is_positional=True,
        )
        for dim in _vocabulary_dims(op)
    ]


def _linear_factors(op: Operator) -> list[Factor]:
    match op.kind:
        case "scatter-add" | "scatter-sub":
            return pending_sums(op, (0, 2))
        case "scatter-mul":
            return pending_sums(op, (0,))
        case "scatter" if op.params["update_jaxpr"] is None and _is_unique(op):
            return pending_sums(op, (0, 2))
    return []


def _is_reducible(op: Operator) -> bool:
    """Whether shards of the result can be reduced: numbers, ordered for MAX, MIN."""
    dtype = op.result_types[0].dtype
    if op.kind in ("scatter-max", "scatter-min"):
        return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return jnp.issubdtype(dtype, jnp.number)


def _is_unique(op: Operator) -> bool:
    """Whether no position is written twice: else devices might differ in who wins."""
    return op.params["unique_indices"] or prod(op.operand_types[1].shape[:-1]) == 1


def _vocabulary_dims(op: Operator) -> list[int]:
    """Dims of the operand that are indexed one position at a time."""
    shape, windows = op.operand_types[0].shape, _window_sizes(op)
    return [
        dim
        for dim in op.params["dimension_numbers"].scatter_dims_to_operand_dims
        if windows[dim] == 1 and 1 < shape[dim] <= MAX_INDEXED_SIZE
    ]


def _window_dims(op: Operator) -> dict[int, int]:
    """The dim of the updates for each dim of the operand that is in their windows."""
    numbers = op.params["dimension_numbers"]
    left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    dims = [dim for dim in range(op.operand_types[0].rank) if dim not in left_out]
    return dict(zip(dims, numbers.update_window_dims, strict=True))


def _window_sizes(op: Operator) -> list[int]:
    """How much of each dim of the operand one update covers."""
    window_dims, updates = _window_dims(op), op.operand_types[2]
    return [
        updates.shape[window_dims[dim]] if dim in window_dims else 1
        for dim in range(op.operand_types[0].rank)
    ]
