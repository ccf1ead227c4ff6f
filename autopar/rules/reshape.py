"""Operators that only rename dims: reshape, transpose, broadcast; and those that make
values from nothing but a shape: iota, empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator, is_zero
from ..sharding.spec import REPLICATED, SUM, axes_of_dim
from .base import (
    Factor,
    Shard,
    bind_params,
    is_inexact,
    pending_sums,
    register,
    shared_dims,
    stay_whole,
)
from .reduce import kept_dims, whole_dims


def _bind_reshape(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    return bind_params(op, operands, new_sizes=shard.result_shape(op))


@register("reshape", bind=_bind_reshape)
def reshape(op: Operator) -> list[Factor]:
    """The leading dims of two groups with equal products share their common divisor.

    With `dimensions`, which the gradient of a grouped convolution has, the operand is
    transposed by them first.
    """
    whole, target = op.operand_types[0].shape, op.result_types[0].shape
    order = op.params["dimensions"] or range(len(whole))
    source = [whole[dim] for dim in order]
    factors = [
        Factor(f"d{order[i]}", (order[i],), (j,), gcd(source[i], target[j]))
        for i, j in group_leaders(source, target)
    ]
    return factors + pending_sums(op, (0,))


def group_leaders(
    source: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The major dims of the smallest groups of dims that hold equally many elements.

    `[6, 4, 5] -> [24, 1, 5]` has the groups 6*4 = 24 and 5 = 5: (0, 0) and (2, 2). A
    block of the major dim is a block of the flat group, so both sides cut alike.
    """
    if 0 in source:
        return
    sources = [dim for dim, size in enumerate(source) if size != 1]
    targets = [dim for dim, size in enumerate(target) if size != 1]
    i = j = 0
    while i < len(sources):
        yield sources[i], targets[j]
        source_size, target_size = source[sources[i]], target[targets[j]]
        i, j = i + 1, j + 1
        while source_size != target_size:
            if source_size < target_size:
                source_size *= source[sources[i]]
                i += 1
            else:
                target_size *= target[targets[j]]
                j += 1


@register("squeeze")
def squeeze(op: Operator) -> list[Factor]:
    removed = op.params["dimensions"]
    return kept_dims(op, removed) + pending_sums(op, (0,))


@register("transpose")
def transpose(op: Operator) -> list[Factor]:
    moved = ((dim, new) for new, dim in enumerate(op.params["permutation"]))
    return shared_dims(op, moved) + pending_sums(op, (0,))


@register("rev")
def rev(op: Operator) -> list[Factor]:
    return whole_dims(op, op.params["dimensions"]) + pending_sums(op, (0,))


def _bind_broadcast(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    return bind_params(op, operands, shape=shard.result_shape(op))


@register("broadcast_in_dim", bind=_bind_broadcast)
def broadcast_in_dim(op: Operator) -> list[Factor]:
    """New and stretched dims are cut for free; a literal zero is a pending zero too."""
    source, target = op.operand_types[0].shape, op.result_types[0].shape
    dims = enumerate(op.params["broadcast_dimensions"])
    source_dims = {int(target_dim): dim for dim, target_dim in dims if source[dim] != 1}
    factors = [
        Factor(f"d{dim}", (source_dims.get(dim, REPLICATED),), (dim,), size)
        for dim, size in enumerate(target)
    ]
    if is_zero(op.operands[0]) and is_inexact(op.result_types[0]):
        factors.append(Factor("zero", (REPLICATED,), (SUM,), size=0, splits=False))
    return factors + pending_sums(op, (0,))


def _bind_tile(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    shapes = shard.operand_shape(op, 0), shard.result_shape(op)
    reps = tuple(
        whole // part if part else 1 for part, whole in zip(*shapes, strict=True)
    )
    return bind_params(op, operands, reps=reps)


@register("tile", bind=_bind_tile)
def tile(op: Operator) -> list[Factor]:
    """A dim that is repeated is whole, and its copies are dealt out."""
    source, reps = op.operand_types[0].shape, op.params["reps"]
    factors = [
        Factor(f"d{dim}", (dim,), (dim,), size)
        if rep == 1
        else Factor(f"d{dim}", (REPLICATED,), (dim,), rep, is_positional=True)
        for dim, (size, rep) in enumerate(zip(source, reps, strict=True))
    ]
    return factors + pending_sums(op, (0,))


def _bind_iota(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Counts in integers, as a narrow dtype cannot add the shard's offset exactly."""
    shape, dim = shard.result_shape(op), op.params["dimension"]
    if not axes_of_dim(shard.result_specs[0], dim):
        return bind_params(op, operands, shape=shape)
    counts = lax.broadcasted_iota(jnp.int32, shape, dim)
    counts += shard.offset(shard.result_specs[0], dim, shape[dim])
    return [counts.astype(op.params["dtype"])]


@register("iota", bind=_bind_iota)
def iota(op: Operator) -> list[Factor]:
    counted = op.params["dimension"]
    return [
        replace(factor, is_positional=dim == counted)
        for dim, factor in enumerate(_result_dims(op))
    ]


@register("empty", bind=_bind_broadcast)
def empty(op: Operator) -> list[Factor]:
    return _result_dims(op)


register("empty2")(stay_whole)  # a scalar


def _result_dims(op: Operator) -> list[Factor]:
    shape = op.result_types[0].shape
    return [Factor(f"d{dim}", (), (dim,), size) for dim, size in enumerate(shape)]
