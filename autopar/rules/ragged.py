"""Products of grouped rows: groups split as experts are, rows as tokens.

`lax.ragged_dot` multiplies the rows of each group by a matrix of their own (Gale et al.
2023, MegaBlocks). A device that holds some of the groups moves their rows to the front,
as rows behind the last group are no work; the rows of others are zero in what it makes,
which is a pending sum. Its gradient by the matrices makes one for each group, and those
of a device's own groups are whole. A shard of rows has of each group what lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM, State
from .base import Factor, Shard, bind_params, linear, register
from .dot import product_factors
from .halos import Traffic, register_traffic, shard_shape

GROUPS, ROWS = "groups", "rows"


def bind_ragged_dot(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Multiply a shard's rows by the matrices of its groups."""
    has_groups, has_rows = (bool(shard.axes_with(name)) for name in (GROUPS, ROWS))
    if not has_groups and not has_rows:
        return bind_params(op, operands)
    left, right, sizes = operands
    left_dim, right_dim = _row_dims(op)
    num_rows = left.shape[left_dim]
    sizes = jnp.asarray(sizes, jnp.int32)
    ends = jnp.cumsum(sizes)
    first_row = shard.offset(shard.operand_specs[0], left_dim, num_rows)
    starts = jnp.clip(ends - sizes - first_row, 0, num_rows)
    ends = jnp.clip(ends - first_row, 0, num_rows)
    if not has_groups:
        return bind_params(op, (left, right, ends - starts))
    if right_dim is not None:
        spec, dim, count = shard.result_specs[0], 0, shard.result_shape(op)[0]
    else:
        spec, (dim,) = shard.operand_specs[1], _group_dims(op)
        count = right.shape[dim]
    first_group = shard.offset(spec, dim, count)
    starts, ends = (
        lax.dynamic_slice_in_dim(each, first_group, count) for each in (starts, ends)
    )
    own_rows, before = ends[-1] - starts[0], starts[0]
    left = jnp.roll(left, -before, left_dim)
    if right_dim is not None:
        right = jnp.roll(right, -before, right_dim)
        return bind_params(op, (left, right, ends - starts))
    (made,) = bind_params(op, (left, right, ends - starts))
    dim = _result_row_dim(op)
    is_own = lax.broadcasted_iota(ends.dtype, made.shape, dim) < own_rows
    return [jnp.roll(jnp.where(is_own, made, 0), before, dim)]


@register("ragged_dot_general", bind=bind_ragged_dot)
def ragged_dot_general(op: Operator) -> list[Factor]:
    """Sizes of groups are whole; those that differ between batches split nothing."""
    if op.operand_types[2].rank != 1:
        return [linear(op, (0,)), linear(op, (1,))]
    numbers = op.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    is_contracted = ragged in numbers.dot_dimension_numbers[0][0]
    factors = product_factors(
        op,
        numbers.dot_dimension_numbers,
        whole_left=(ragged,),
        group_dims=numbers.rhs_group_dimensions,
        first_dim=int(is_contracted),
    )
    if ragged not in numbers.dot_dimension_numbers[1][0]:
        factors += _ragged_factors(op, is_contracted)
    return factors


def _ragged_factors(op: Operator, is_contracted: bool) -> list[Factor]:
    left, _, sizes = op.operand_types
    left_dim, right_dim = _row_dims(op)
    rows: tuple[State, State] = (left_dim, REPLICATED)
    if right_dim is not None:
        rows = (left_dim, right_dim)
    group: State = REPLICATED if is_contracted else _group_dims(op)[0]
    return [
        Factor(
            ROWS,
            (*rows, REPLICATED),
            (SUM if is_contracted else _result_row_dim(op),),
            left.shape[left_dim],
            is_positional=True,
        ),
        Factor(
            GROUPS,
            (REPLICATED, group, REPLICATED),
            (0 if is_contracted else SUM,),
            sizes.shape[0],
            is_positional=True,
        ),
    ]


def _row_dims(op: Operator) -> tuple[int, int | None]:
    """The dim of operand 0 that is grouped, and of operand 1 if it is contracted."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (left_dim,) = numbers.lhs_ragged_dimensions
    left_contract, right_contract = numbers.dot_dimension_numbers[0]
    if left_dim not in left_contract:
        return left_dim, None
    return left_dim, right_contract[left_contract.index(left_dim)]


def _group_dims(op: Operator) -> tuple[int, ...]:
    """The dims of operand 1 along which groups lie."""
    return op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions


def _result_row_dim(op: Operator) -> int:
    """The dim of the result in which the grouped rows lie, if they are in it."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    free = [
        dim
        for dim in range(op.operand_types[0].rank)
        if dim not in contracted and dim not in batch
    ]
    return len(batch) + free.index(ragged)


def rows_moved(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int]
) -> Traffic:
    """What a device that holds some of the groups copies to bring their rows together.

    Rows that it reads are copied once, and those that it makes once more.
    """
    parts = prod(
        size for size, f in zip(sizes, factors, strict=True) if f.name == GROUPS
    )
    if parts == 1:
        return Traffic((), 0, 0, 1)
    _, right_dim = _row_dims(op)
    copied = [(0, False, op.operand_types[0])]
    if right_dim is None:
        copied.append((0, True, op.result_types[0]))
    else:
        copied.append((1, False, op.operand_types[1]))
    held = sum(
        prod(shard_shape(op, factors, sizes, position, is_result)) * kind.dtype.itemsize
        for position, is_result, kind in copied
    )
    return Traffic((), held, 2 * held, 1)


register_traffic("ragged_dot_general", rows_moved)
