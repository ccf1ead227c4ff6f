"""What the kernel's gradient of a depthwise convolution holds in XLA's CPU programs.

That backend convolves every channel with every other, and then picks what belongs
together (XLA's `ConvolutionGroupConverter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ..graph.op_graph import GraphColumns, Operator
from ..sharding.spec import Spec, num_shards


def depthwise_rows(columns: GraphColumns) -> np.ndarray:
    """Rows of convolutions with a group of the batch for each feature."""
    return np.flatnonzero(columns.where(_is_depthwise))


def depthwise_bytes(op: Operator, spec: Spec, axis_sizes: Sequence[int]) -> int:
    """What one device holds besides the result, which it makes in `spec`."""
    features = op.params["dimension_numbers"].out_spec[1]
    split = [n for dim, n in zip(spec, axis_sizes, strict=True) if dim == features]
    groups = op.params["batch_group_count"] // prod(split)
    result_bytes = op.result_types[0].bytes // num_shards(spec, axis_sizes)
    return 2 * groups * result_bytes  # with every other, and of these turned


def _is_depthwise(op: Operator) -> bool:
    if op.kind != "conv_general_dilated" or op.params["batch_group_count"] == 1:
        return False
    features = op.params["dimension_numbers"].out_spec[1]
    return op.result_types[0].shape[features] == op.params["batch_group_count"]
