"""Decompositions, solves and Fourier transforms: batch dims are parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED
from .base import (
    Factor,
    Shard,
    bind_params,
    pending_sums,
    register,
    shared_dims,
    stay_whole,
)

# The number of trailing dims of operand 0 that one problem spans.
_PROBLEM_RANK = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}


def batch_dims(op: Operator, problem_rank: int) -> list[Factor]:
    """A factor for each leading dim, which all operands and results share."""
    dims = range(op.operand_types[0].rank - problem_rank)
    return shared_dims(op, zip(dims, dims, strict=True), letter="b")


@register(*(kind for kind in _PROBLEM_RANK if kind != "triangular_solve"))
def batched_problem(op: Operator) -> list[Factor]:
    return batch_dims(op, _PROBLEM_RANK[op.kind])


# JAX has it for one matrix only, so there is no batch to split.
register("cholesky_update")(stay_whole)


@register("triangular_solve")
def triangular_solve(op: Operator) -> list[Factor]:
    """Each right-hand side is solved on its own, and the result is linear in them."""
    rank = op.operand_types[1].rank
    dim = rank - 1 if op.params["left_side"] else rank - 2
    size = op.operand_types[1].shape[dim]
    factors = batch_dims(op, _PROBLEM_RANK[op.kind])
    factors.append(Factor(f"n{dim}", (REPLICATED, dim), (dim,), size))
    return factors + pending_sums(op, (1,))


def bind_fft(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Transform a shard that is row-major, as XLA's CPU transform demands of both ends.

    XLA itself lays an operand or result out as the collective beside it likes best, and
    then fails when it runs.
    """
    del shard
    (operand,) = operands
    (result,) = bind_params(op, [_row_major(operand)])
    return [_row_major(result)]


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@register("fft", bind=bind_fft)
def fft(op: Operator) -> list[Factor]:
    return batch_dims(op, len(op.params["fft_lengths"])) + pending_sums(op, (0,))
