"""Convolutions: batch, features, groups and space split, the last with halos.

Which dim is the batch and which the features is read from `dimension_numbers`, so that
the gradients, which JAX writes as convolutions with dims swapped, need no other rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM
from .base import Factor, Halo, Shard, bind_params, linear, register
from .halos import TAPS, WINDOW, extended, halos_of, window_halo, window_padding

FEATURE_GROUPS = "feature_groups"
BATCH_GROUPS = "batch_groups"


def bind_conv(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Convolve a shard with its halo, and with its part of the groups if split."""

    def num_groups(param: str, factor_name: str) -> int:
        axes = shard.axes_with(factor_name)
        return op.params[param] // prod(shard.mesh.axis_sizes[axis] for axis in axes)

    left, right = extended(operands[0], 0, shard), operands[1]
    halos = {halo.dim: halo for halo, _ in halos_of(shard.factors, 0)}
    padding = list(op.params["padding"])
    for i, dim in enumerate(_spatial_dims(op)):
        if dim.left_dim in halos:
            num_results = shard.result_shape(op)[dim.result_dim]
            num_taps = right.shape[dim.right_dim]
            needed = (num_results - 1) * dim.stride
            needed += (num_taps - 1) * dim.right_dilation + 1
            padding[i] = window_padding(
                dim.padding[0],
                needed,
                left.shape[dim.left_dim],
                halos[dim.left_dim],
                dim.left_dilation,
            )
    return bind_params(
        op,
        [left, right],
        padding=tuple(padding),
        feature_group_count=num_groups("feature_group_count", FEATURE_GROUPS),
        batch_group_count=num_groups("batch_group_count", BATCH_GROUPS),
    )


@register("conv_general_dilated", bind=bind_conv)
def conv_general_dilated(op: Operator) -> list[Factor]:
    numbers = op.params["dimension_numbers"]
    batch, features, *_ = numbers.lhs_spec
    out_features, in_features, *_ = numbers.rhs_spec
    result_batch, result_features, *_ = numbers.out_spec
    left, right = (kind.shape for kind in op.operand_types)
    feature_groups = op.params["feature_group_count"]
    batch_groups = op.params["batch_group_count"]
    factors = []
    if batch_groups == 1:
        states = (batch, REPLICATED)
        factors.append(Factor("batch", states, (result_batch,), left[batch]))
    else:
        states = (batch, out_features)
        factors.append(Factor(BATCH_GROUPS, states, (result_features,), batch_groups))
    if feature_groups == 1:
        states = (features, in_features)
        factors.append(Factor("in_features", states, (SUM,), left[features]))
    else:
        states, result = (features, out_features), (result_features,)
        factors.append(Factor(FEATURE_GROUPS, states, result, feature_groups))
    if batch_groups == feature_groups == 1:
        states, size = (REPLICATED, out_features), right[out_features]
        factors.append(Factor("out_features", states, (result_features,), size))
    return [*factors, *_window_factors(op), linear(op, (0,)), linear(op, (1,))]


@dataclass(frozen=True)
class _SpatialDim:
    """One spatial dim of a convolution: where it lies, and how windows move in it."""

    left_dim: int
    right_dim: int
    result_dim: int
    stride: int
    padding: tuple[int, int]
    left_dilation: int
    right_dilation: int


def _spatial_dims(op: Operator) -> list[_SpatialDim]:
    numbers, params = op.params["dimension_numbers"], op.params
    geometry = zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    return [_SpatialDim(*each) for each in geometry]


def _window_factors(op: Operator) -> Iterator[Factor]:
    """Spatial dims, split where the parts of left and result (or right) keep pace.

    Left and result move on together in a convolution and its gradient by the left. In
    the gradient by the kernel the large operands are left and right, of which all
    elements meet: the result is a sum. A dim has one of the two, with the least halo.
    """
    for dim in _spatial_dims(op):
        left = op.operand_types[0].shape[dim.left_dim]
        right = op.operand_types[1].shape[dim.right_dim]
        result = op.result_types[0].shape[dim.result_dim]
        windows = (result, dim.stride), (right, dim.right_dilation)
        found: list[Factor] = []
        for is_sum, ((size, step), (others, width)) in enumerate(
            (windows, windows[::-1])
        ):
            if not size or size * step != left * dim.left_dilation:
                continue
            span = (others - 1) * width
            sides = window_halo(dim.padding[0], span, step, dim.left_dilation)
            states = (dim.left_dim, dim.right_dim if is_sum else REPLICATED)
            found.append(
                Factor(
                    f"{TAPS if is_sum else WINDOW}{dim.left_dim}",
                    states,
                    (SUM if is_sum else dim.result_dim,),
                    gcd(left, size),
                    is_positional=max(sides) > 0,
                    halos=(Halo(0, dim.left_dim, left, *sides),),
                )
            )
        if found:
            yield min(found, key=lambda factor: _width(factor.halos[0]))


def _width(halo: Halo) -> int:
    return max(halo.before, 0) + max(halo.after, 0)
