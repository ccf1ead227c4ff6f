"""Elementwise operators: each result dim is a factor, which no size-1 dim shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator, TensorType, is_zero
from ..sharding.relayout import relayout_like_p
from ..sharding.spec import REPLICATED
from .base import Factor, Shard, is_inexact, pending_sums, register

UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj "
    "convert_element_type copy cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor "
    "imag integer_pow is_finite lgamma log log1p log2 logistic name neg not "
    "one_minus_square population_count real reduce_precision round rsqrt sign sin "
    "sinh sqrt square stop_gradient tan tanh"
).split()
NARY = (
    "add add_any and atan2 clamp complex div eq eq_to ge gt igamma igamma_grad_a "
    "igammac le le_to lt lt_to max min mul ne nextafter or polygamma pow "
    "regularized_incomplete_beta rem select_n shift_left "
    "shift_right_arithmetic shift_right_logical sub xor zeta"
).split()


def dim_factors(op: Operator) -> list[Factor]:
    """One factor for each dim of the results; operands that broadcast it stay whole."""
    shape = op.result_types[0].shape
    return [
        Factor(
            f"d{dim}",
            tuple(_state(kind, dim, len(shape)) for kind in op.operand_types),
            (dim,) * len(op.results),
            size=size,
        )
        for dim, size in enumerate(shape)
    ]


def _state(kind: TensorType, dim: int, rank: int) -> int:
    return dim if kind.rank == rank and kind.shape[dim] != 1 else REPLICATED


def _linear_factors(op: Operator) -> list[Factor]:
    """How a pending sum passes."""
    match op.kind:
        case "add" | "add_any" | "sub" | "complex":
            return pending_sums(op, [i for i in (0, 1) if not is_zero(op.operands[i])])
        case "mul":
            return pending_sums(op, (0,), (1,))
        case "div" | "neg" | "conj" | "real" | "imag":
            return pending_sums(op, (0,))
        case "copy" | "name" | "stop_gradient":
            return pending_sums(op, (0,))
        case "select_n":
            return pending_sums(op, range(1, len(op.operands)))
        case "convert_element_type" if _widens(op):
            return pending_sums(op, (0,))
    return []


def _widens(op: Operator) -> bool:
    """Whether digits are kept: of complex numbers those of their real part."""
    source, target = op.operand_types[0], op.result_types[0]
    if not (is_inexact(source) and is_inexact(target)):
        return False
    return jnp.finfo(target.dtype).bits >= jnp.finfo(source.dtype).bits


@register(*UNARY, *NARY)
def elementwise(op: Operator) -> list[Factor]:
    return [*dim_factors(op), *_linear_factors(op)]


@register("bitcast_convert_type")
def bitcast_convert_type(op: Operator) -> list[Factor]:
    """Dims before the one, if any, that a change of width adds or takes away."""
    shape = op.operand_types[0].shape
    shared = min(len(shape), op.result_types[0].rank)
    return [Factor(f"d{dim}", (dim,), (dim,), shape[dim]) for dim in range(shared)]


def _bind_memory(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Values stay on the devices that the plan has them on, in the memory they ask for.

    `jax.checkpoint` policies put what is saved into the host's memory so.
    """
    del shard
    asked = op.params.get("devices", ())
    spaces = [each if isinstance(each, jax.memory.Space) else None for each in asked]
    return [
        operand if space is None else jax.device_put(operand, space)
        for operand, space in zip_longest(operands, spaces)
    ]


@register("device_put", "layout_constraint", bind=_bind_memory)
def device_put(op: Operator) -> list[Factor]:
    if len(op.operands) > 1:
        return []
    return [*dim_factors(op), *pending_sums(op, (0,))]


def _bind_first(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """A value laid out like another: the other says where, and that is done by now.

    It is kept alive, as the plan has what it is made by.
    """
    del op, shard
    return [lax.optimization_barrier(tuple(operands))[0]]


register(relayout_like_p.name, bind=_bind_first)(dim_factors)
