"""Reductions over sliding windows: the dims that no window spans are parallel."""

from __future__ import annotations

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED
from .base import Factor, pending_sums, register


def unwindowed_dims(op: Operator, num_scalars: int = 0) -> list[Factor]:
    """A factor for each dim along which every window is one element.

    Args:
      op: its last `num_scalars` operands are initial values, the others arrays.
      num_scalars: number of initial values.
    """
    params, rank = op.params, op.operand_types[0].rank
    ones = (1,) * rank
    windows = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation") or ones,
        strict=True,
    )
    num_arrays = len(op.operands) - num_scalars
    return [
        Factor(
            f"d{dim}",
            (dim,) * num_arrays + (REPLICATED,) * num_scalars,
            (dim,) * len(op.results),
            op.operand_types[0].shape[dim],
        )
        for dim, (window, stride, padding, dilation) in enumerate(windows)
        if window == stride == dilation == 1 and tuple(padding) == (0, 0)
    ]


@register("reduce_window_max", "reduce_window_min")
def reduce_window_extremum(op: Operator) -> list[Factor]:
    return unwindowed_dims(op)


@register("reduce_window_sum", "select_and_scatter_add", "select_and_gather_add")
def reduce_window_sum(op: Operator) -> list[Factor]:
    """All are linear in operand 0: the summed, scattered or gathered array."""
    return unwindowed_dims(op) + pending_sums(op, (0,))


@register("reduce_window")
def reduce_window(op: Operator) -> list[Factor]:
    return unwindowed_dims(op, num_scalars=len(op.results))


@register("select_and_scatter")
def select_and_scatter(op: Operator) -> list[Factor]:
    return unwindowed_dims(op, num_scalars=1)
