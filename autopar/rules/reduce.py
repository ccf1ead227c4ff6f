"""Reductions, sorts and running sums along dims.

A reduced dim may be split where the reduction has a pending state; the dim that a sort
or a running sum goes along must be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..graph.op_graph import Operator
from ..sharding.spec import MAX, MIN, SUM, State
from .base import Factor, pending_sums, register, shared_dims

_PENDING: dict[str, State] = {
    "reduce_sum": SUM,
    "reduce_max": MAX,
    "reduce_min": MIN,
    "reduce_or": MAX,
    "reduce_and": MIN,
    "psum": SUM,
    "pmax": MAX,
    "pmin": MIN,
}


@register("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and")
@register("reduce_prod", "reduce_xor", "argmax", "argmin")
def reduction(op: Operator) -> list[Factor]:
    axes = op.params["axes"]
    factors = kept_dims(op, axes)
    if _may_be_pending(op):
        (kind,) = op.operand_types
        state = (_PENDING[op.kind],)
        factors += [Factor(f"k{dim}", (dim,), state, kind.shape[dim]) for dim in axes]
    is_sum = op.kind in ("reduce_sum", "psum")
    return factors + (pending_sums(op, (0,)) if is_sum else [])


@register("psum", "pmax", "pmin")
def mapped_reduction(op: Operator) -> Sequence[Factor]:
    """What `vmap` makes of a collective over its own axis: axes are dims, not names."""
    axes = op.params["axes"]
    has_names = not all(isinstance(axis, int) for axis in axes)
    if has_names or len(op.operands) > 1 or op.params["axis_index_groups"]:
        return []
    return list(reduction(op))


def _may_be_pending(op: Operator) -> bool:
    dtype = op.operand_types[0].dtype
    match op.kind:
        case "reduce_or" | "reduce_and":  # bitwise on integers
            return dtype == np.bool_
        case "reduce_max" | "reduce_min" | "pmax" | "pmin":
            return not np.issubdtype(dtype, np.complexfloating)
    return op.kind in _PENDING


@register("reduce")
def generic_reduction(op: Operator) -> list[Factor]:
    return kept_dims(op, op.params["dimensions"], num_arrays=len(op.results))


def kept_dims(
    op: Operator, reduced: Collection[int], num_arrays: int = 1
) -> list[Factor]:
    """A factor for each dim that a reduction keeps.

    Args:
      op: its first `num_arrays` operands have one shape, its results another.
      reduced: the dims that no result has.
      num_arrays: the operands behind them are initial values.
    """
    kept = [dim for dim in range(op.operand_types[0].rank) if dim not in reduced]
    num_others = len(op.operands) - num_arrays
    return shared_dims(
        op, zip(kept, range(len(kept)), strict=True), num_whole=num_others
    )


def whole_dims(op: Operator, whole: Collection[int]) -> list[Factor]:
    """A factor for each dim but those in `whole`; operands and results share it."""
    dims = (dim for dim in range(op.operand_types[0].rank) if dim not in whole)
    return shared_dims(op, ((dim, dim) for dim in dims))


# Which param names the dim that they run along.
_ALONG = {"sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension"}


@register(*_ALONG)
def ordering(op: Operator) -> list[Factor]:
    dim = op.params[_ALONG[op.kind]] % op.operand_types[0].rank
    return whole_dims(op, (dim,))


@register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Operator) -> list[Factor]:
    factors = whole_dims(op, (op.params["axis"],))
    return factors + (pending_sums(op, (0,)) if op.kind == "cumsum" else [])
