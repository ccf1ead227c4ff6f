"""How a maximum or minimum over the examples passes an operator of a microbatch.

What is the same in every microbatch is its own maximum, so it needs no mask, as an
addend does; whatever moves elements moves their maxima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Constant, Operator, TensorType
from ..rules.base import Factor, factors_of, is_inexact, neutral
from ..sharding.spec import MAX, MIN, REPLICATED, SUM, State

JOINS = {SUM: lax.add, MAX: lax.max, MIN: lax.min}
_OPPOSITE = {MAX: MIN, MIN: MAX}
_OWN = {
    MAX: ("max", "or", "reduce_max", "reduce_or", "cummax"),
    MIN: ("min", "and", "reduce_min", "reduce_and", "cummin"),
}
_MOVING = frozenset(
    "broadcast_in_dim concatenate copy device_put dynamic_slice dynamic_update_slice "
    "gather name pad reshape rev scatter select_n slice split squeeze stack "
    "stop_gradient transpose unstack".split()
)


def start_of(reduction: State, shape: Sequence[int], dtype: Any) -> jax.Array:
    """What a loop begins with: it changes no sum, maximum or minimum."""
    return jnp.full(shape, neutral(reduction, dtype), dtype)


def microbatch_factors(op: Operator) -> tuple[Factor, ...]:
    """All that a loop over microbatches may do to an operator."""
    found = factors_of(op, counting=True)
    if not all(map(_is_ordered, op.result_types)):
        return found
    return (*found, *_extreme_factors(op, found))


def _extreme_factors(op: Operator, others: Sequence[Factor]) -> Iterator[Factor]:
    positions = range(len(op.operands))
    for state in (MAX, MIN):
        for pending, made in _monotone(op, state, others):
            operands = (state if i in pending else REPLICATED for i in positions)
            results = (made,) * len(op.results)
            yield Factor("extreme", tuple(operands), results, size=0, splits=False)


def _monotone(
    op: Operator, state: State, others: Sequence[Factor]
) -> Iterator[tuple[Sequence[int], State]]:
    """Operands whose maxima, or minima, an operator makes into those of its results."""
    if op.kind in _MOVING:
        for factor in others:
            sums = [i for i, each in enumerate(factor.operands) if each == SUM]
            if sums and not factor.splits:
                yield sums, state
    elif op.kind in _OWN[state]:
        yield range(len(op.operands)), state
    elif op.kind in ("max", "min"):
        yield from (((i,), state) for i in (0, 1))
    elif op.kind == "convert_element_type" and op.operand_types[0].dtype == np.bool_:
        yield (0,), state
    elif not all(map(is_inexact, op.result_types)):
        return  # integers may wrap
    elif op.kind in ("add", "add_any"):
        yield from (((i,), state) for i in (0, 1))
    elif op.kind == "sub":
        yield (0,), state
        yield (1,), _OPPOSITE[state]
    elif op.kind == "neg":
        yield (0,), _OPPOSITE[state]
    elif op.kind in ("mul", "div"):
        factors = [0] if op.kind == "div" else [0, 1]
        yield from (((i,), state) for i in factors if _is_positive(op, 1 - i))
    elif op.kind == "reduce_precision" or (
        op.kind == "convert_element_type" and _is_ordered(op.operand_types[0])
    ):
        yield (0,), state


def _is_ordered(kind: TensorType) -> bool:
    """Whether elements are real numbers or truth values."""
    is_complex = jnp.issubdtype(kind.dtype, jnp.complexfloating)
    return not kind.is_extended and not is_complex


def _is_positive(op: Operator, position: int) -> bool:
    operand = op.operands[position]
    return isinstance(operand, Constant) and bool(
        np.all((operand.value > 0) & (operand.value < np.inf))
    )
