"""Reductions over sliding windows: dims are parallel, with halos where they overlap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator
from ..sharding.spec import MAX, MIN, REPLICATED
from .base import (
    Factor,
    Halo,
    Shard,
    bind_params,
    neutral,
    pending_sums,
    register,
)
from .halos import WINDOW, extended, halos_of, returned, window_halo, window_padding


def window_factors(
    op: Operator,
    num_scalars: int = 0,
    *,
    smaller: Collection[int] = (),
    has_halos: bool = True,
) -> list[Factor]:
    """A factor for each dim, those along which windows are one element without halos.

    Args:
      op: its last `num_scalars` operands are initial values, the others arrays.
      num_scalars: number of initial values.
      smaller: the operands that have an element for each window, as the result has
        where this is empty. If there are some, the result is as large as the others.
      has_halos: whether dims with windows of several elements may be split.
    """
    params, rank = op.params, op.operand_types[0].rank
    ones = (1,) * rank
    num_arrays = len(op.operands) - num_scalars
    whole = [p for p in range(num_arrays) if p not in smaller]
    shape = op.operand_types[whole[0]].shape
    windows = op.operand_types[min(smaller)] if smaller else op.result_types[0]
    geometry = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation") or ones,
        params.get("window_dilation") or ones,
        strict=True,
    )
    factors = []
    for dim, (window, stride, padding, dilation, width) in enumerate(geometry):
        size, num_windows = shape[dim], windows.shape[dim]
        operands = (dim,) * num_arrays + (REPLICATED,) * num_scalars
        results = (dim,) * len(op.results)
        if window == stride == dilation == 1 and tuple(padding) == (0, 0):
            factors.append(Factor(f"d{dim}", operands, results, size))
        elif has_halos and num_windows and num_windows * stride == size * dilation:
            span = (window - 1) * width
            sides = window_halo(padding[0], span, stride, dilation)
            halos = [Halo(p, dim, size, *sides) for p in whole]
            if smaller:
                halos.append(Halo(0, dim, size, *sides, is_result=True))
            factors.append(
                Factor(
                    f"{WINDOW}{dim}",
                    operands,
                    results,
                    gcd(size, num_windows),
                    is_positional=max(sides) > 0,
                    halos=tuple(halos),
                )
            )
    return factors


def _bind_reduction(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Reduce shards with their halos; behind the borders lie initial values."""
    params, num_arrays = op.params, len(op.results)
    match op.kind:
        case "reduce_window":  # an initial value for each array
            beyond = operands[num_arrays:]
        case _:
            beyond = [_identity(op)]
    pairs = zip(operands[:num_arrays], beyond, strict=True)
    arrays = [extended(x, i, shard, value) for i, (x, value) in enumerate(pairs)]
    padding = [tuple(each) for each in params["padding"]]
    for halo, _ in halos_of(shard.factors, 0):
        dim = halo.dim
        num_windows = shard.result_shape(op)[dim]
        span = (params["window_dimensions"][dim] - 1) * params["window_dilation"][dim]
        padding[dim] = window_padding(
            padding[dim][0],
            (num_windows - 1) * params["window_strides"][dim] + span + 1,
            arrays[0].shape[dim],
            halo,
            params["base_dilation"][dim],
        )
    return bind_params(op, [*arrays, *operands[num_arrays:]], padding=tuple(padding))


def _identity(op: Operator) -> Any:
    """What a window holds where it lies beyond the borders."""
    dtype = op.operand_types[0].dtype
    if op.kind == "reduce_window_sum":
        return 0
    return neutral(MAX if op.kind == "reduce_window_max" else MIN, dtype)


@register("reduce_window_max", "reduce_window_min", bind=_bind_reduction)
def reduce_window_extremum(op: Operator) -> list[Factor]:
    return window_factors(op)


@register("reduce_window_sum", bind=_bind_reduction)
def reduce_window_sum(op: Operator) -> list[Factor]:
    return window_factors(op) + pending_sums(op, (0,))


@register("reduce_window", bind=_bind_reduction)
def reduce_window(op: Operator) -> list[Factor]:
    return window_factors(op, num_scalars=len(op.results))


@register("select_and_gather_add")
def select_and_gather_add(op: Operator) -> list[Factor]:
    """Linear in what is gathered."""
    return window_factors(op, has_halos=False) + pending_sums(op, (0,))


def _never_selected(op: Operator) -> float:
    """What is selected only where a window holds nothing else."""
    return -jnp.inf if op.params["select_prim"] is lax.ge_p else jnp.inf


def _bind_scatter_add(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Scatter own windows; what falls beside the shard is added to the neighbours'."""
    halos = halos_of(shard.factors, 1)
    if not halos:
        return bind_params(op, operands)
    source, array = operands
    array = extended(array, 1, shard, _never_selected(op))
    padding = [tuple(each) for each in op.params["padding"]]
    for halo, _ in halos:
        padding[halo.dim] = (0, 0)
    (result,) = bind_params(op, [source, array], padding=tuple(padding))
    return [returned(result, 0, shard)]


@register("select_and_scatter_add", bind=_bind_scatter_add)
def select_and_scatter_add(op: Operator) -> list[Factor]:
    """Linear in what is scattered."""
    is_real = jnp.issubdtype(op.operand_types[1].dtype, jnp.floating)
    factors = window_factors(op, smaller=(0,), has_halos=bool(is_real))
    return factors + pending_sums(op, (0,))


@register("select_and_scatter")
def select_and_scatter(op: Operator) -> list[Factor]:
    return window_factors(op, num_scalars=1, has_halos=False)
