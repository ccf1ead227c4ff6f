"""Convolutions: batch, features and groups split; overlapping windows stay whole.

Which dim is the batch and which the features is read from `dimension_numbers`, so that
the gradients, which JAX writes as convolutions with dims swapped, need no other rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM
from .base import Factor, Shard, bind_params, linear, register

FEATURE_GROUPS = "feature_groups"
BATCH_GROUPS = "batch_groups"


def bind_conv(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Convolve a shard, which holds its part of the groups where these are split."""

    def num_groups(param: str, factor_name: str) -> int:
        axes = shard.axes_with(factor_name)
        return op.params[param] // prod(shard.mesh.axis_sizes[axis] for axis in axes)

    return bind_params(
        op,
        operands,
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
    return [*factors, *_patch_factors(op), linear(op, (0,)), linear(op, (1,))]


def _patch_factors(op: Operator) -> list[Factor]:
    """Spatial dims cut into patches that never overlap, so that shards need no halo.

    A patch embedding or a 1x1 convolution, or the gradient of one: one of left, right
    and result is the number of patches, one the size of a patch, one their product.
    """
    numbers, params = op.params["dimension_numbers"], op.params
    spatial = zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    factors = []
    for left_dim, right_dim, result_dim, stride, padding, *dilations in spatial:
        left = op.operand_types[0].shape[left_dim]
        right = op.operand_types[1].shape[right_dim]
        result = op.result_types[0].shape[result_dim]
        geometry = (stride, *padding, *dilations)
        if left == result * right and geometry == (right, 0, 0, 1, 1):
            states, end = (left_dim, REPLICATED), result_dim
            factors.append(Factor(f"patches{left_dim}", states, (end,), result))
        elif result == left * right and geometry == (1, right - 1, right - 1, right, 1):
            states, end = (left_dim, REPLICATED), result_dim
            factors.append(Factor(f"patches{left_dim}", states, (end,), left))
        elif left == right * result and geometry == (1, 0, 0, 1, result):
            states = (left_dim, right_dim)
            factors.append(Factor(f"patches{left_dim}", states, (SUM,), right))
    return factors
