"""What XLA for CPUs and GPUs writes out for operators that it has no kernels for."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.op_graph import Operator

EXPANDED = frozenset(["ragged_dot_general", "select_and_scatter_add"])


def expanded_bytes(op: Operator, sizes: Sequence[int], is_cpu: bool) -> int:
    """Bytes a device for one of `EXPANDED`, whose operands take `sizes` bytes there."""
    kinds = op.operand_types
    if op.kind == "ragged_dot_general":  # a masked copy of the rows for each group
        groups = sizes[2] // kinds[2].dtype.itemsize
        has_groups = op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        return groups * (sizes[0] if has_groups else sizes[0] + sizes[1])
    # The place of each window's maximum in every dim; on CPUs of each element, too.
    index = 4 * len(kinds[0].shape) / kinds[0].dtype.itemsize
    return round(sizes[0] * (1 + index) + is_cpu * (sizes[0] + sizes[1] * index))
