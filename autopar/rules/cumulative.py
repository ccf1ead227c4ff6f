"""Cumulative operators: along a split dim shards hand on what they come to in all.

A shard accumulates its own part and adds to it what all shards before it come to, which
takes log2(n) exchanges with the one 1, 2, 4, ... before (Hillis and Steele 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator
from .base import Factor, Halo, Shard, bind_params, pending_sums, register
from .halos import Exchange, Traffic, register_traffic, shard_shape
from .reduce import whole_dims

ALONG = "along"
_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def bind_cumulative(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Accumulate a shard, and add what those before it come to."""
    (own,) = bind_params(op, operands)
    axes = shard.axes_with(ALONG)
    count = prod(shard.mesh.axis_sizes[axis] for axis in axes)
    if count == 1:
        return [own]
    dim, is_reverse = op.params["axis"], op.params["reverse"]
    combine = _COMBINE[op.kind]
    names = tuple(shard.mesh.axis_names[axis] for axis in axes)
    position = shard.block_index(axes)
    if is_reverse:
        position = count - 1 - position
    last = 0 if is_reverse else own.shape[dim] - 1
    total = lax.slice_in_dim(own, last, last + 1, axis=dim)
    before = total
    for shift in _shifts(count):
        step = -shift if is_reverse else shift
        pairs = [(i, i + step) for i in range(count) if 0 <= i + step < count]
        received = lax.ppermute(total, names, pairs)
        if shift == 1:
            before = received
        else:
            before = jnp.where(position < shift, before, combine(received, before))
        total = jnp.where(position < shift, total, combine(received, total))
    return [jnp.where(position == 0, own, combine(before, own))]


@register(*_COMBINE, bind=bind_cumulative)
def cumulative(op: Operator) -> list[Factor]:
    """The dim that it runs along is split where its elements are numbers."""
    dim, (kind,) = op.params["axis"], op.operand_types
    factors = whole_dims(op, (dim,))
    if jnp.issubdtype(kind.dtype, jnp.number):
        size = kind.shape[dim]
        halo = Halo(0, dim, size, 0, 0)  # neighbours are sent totals, no elements
        factors.append(
            Factor(ALONG, (dim,), (dim,), size, is_positional=True, halos=(halo,))
        )
    return factors + (pending_sums(op, (0,)) if op.kind == "cumsum" else [])


def handed_on(op: Operator, factors: Sequence[Factor], sizes: Sequence[int]) -> Traffic:
    """The exchanges of totals; the result is read and written once more."""
    axes = tuple(i for i, factor in enumerate(factors) if factor.name == ALONG)
    count = prod(sizes[axis] for axis in axes)
    if count == 1:
        return Traffic((), 0, 0, 1)
    (kind,) = op.result_types
    shape = list(shard_shape(op, factors, sizes, 0, is_result=True))
    all_bytes = prod(shape) * kind.dtype.itemsize
    shape[op.params["axis"]] = 1
    total_bytes = prod(shape) * kind.dtype.itemsize
    away = -1 if op.params["reverse"] else 1
    exchanges = tuple(
        Exchange(axes, away * shift, kind.dtype.name, total_bytes)
        for shift in _shifts(count)
    )
    return Traffic(exchanges, 2 * total_bytes, 2 * all_bytes, 1)


def _shifts(count: int) -> list[int]:
    """1, 2, 4, ...: after which everyone has received from all before it."""
    return [1 << i for i in range((count - 1).bit_length())]


for _kind in _COMBINE:
    register_traffic(_kind, handed_on)
