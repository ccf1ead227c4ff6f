"""What operators are to memory, and what XLA writes out where it has no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from ..attention.rule import FUSED_KINDS
from ..graph.build_graph import PINS, SCAN, STRUCTURED
from ..graph.op_graph import GraphColumns, Operator
from .compute import is_fusable

VIEW, FUSED, IN_PLACE, KERNEL = range(4)
_VIEWS = frozenset(
    "copy device_put expand_dims layout_constraint name reshape squeeze"
    " stop_gradient".split()
)
_MOVING = frozenset(
    "broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota pad"
    " rev select_n slice split stack transpose unstack".split()
)
_READING = ("reduce_", "arg", "scatter")  # kernels that do what they read themselves
_SCORES_HELD = dict(zip(FUSED_KINDS, (2, 4), strict=True))  # at once
EXPANDED = frozenset(["ragged_dot_general", "select_and_scatter_add", *_SCORES_HELD])


@lru_cache(maxsize=8)
def kinds_of(columns: GraphColumns) -> dict[int, int]:
    """What each operator is to memory, by index."""
    kinds = np.array([kind_of(op) for op in columns.distinct], np.intp)[columns.alike]
    return dict(zip(columns.index.tolist(), kinds.tolist(), strict=True))


def kind_of(op: Operator) -> int:
    """`VIEW`, `FUSED`, `IN_PLACE` or `KERNEL`."""
    is_one = len(op.operands) == len(op.results)
    if op.kind in PINS or (op.kind in _VIEWS and is_one):
        return VIEW
    if op.kind == "convert_element_type":
        same = op.operand_types[0].dtype == op.result_types[0].dtype
        return VIEW if same and is_one else FUSED
    if op.kind == "broadcast_in_dim" and is_one:  # to dims of one, if to no more
        same = op.operand_types[0].size == op.result_types[0].size
        return VIEW if same else FUSED
    if op.kind in STRUCTURED:
        return KERNEL
    if op.kind == "dot_general":  # outer products, and rows with rows, are none to XLA
        (contracted, _), (batch, _) = op.params["dimension_numbers"]
        shared = len(contracted) + len(batch)
        is_of_rows = all(len(each.shape) == shared for each in op.operand_types)
        return (IN_PLACE if is_of_rows else KERNEL) if contracted else FUSED
    is_fused = op.kind in _MOVING or is_fusable(op.kind)
    return FUSED if is_fused else IN_PLACE if op.kind.startswith(_READING) else KERNEL


def fresh_of(op: Operator, kind: int, writes: Sequence[int]) -> Sequence[int]:
    """Of what an operator of a kind writes, all that cannot lie over what it reads.

    Those are results of a product, say, and stacks of a loop, which goes along others.
    """
    if op.kind == SCAN:
        return writes[op.params["num_carry"] :]
    return writes if kind == KERNEL and op.kind not in STRUCTURED else ()


def expanded_bytes(op: Operator, sizes: Sequence[int], family: str) -> int:
    """Bytes a device for one of `EXPANDED`, whose operands take `sizes` bytes there.

    `family` is the device's: `CPU`, `TPU` or `GPU`.
    """
    kinds, is_cpu = op.operand_types, family == "CPU"
    if op.kind in _SCORES_HELD:  # which CPUs have no kernel for
        a = op.params["attention"]
        size, itemsize = a.sizes(*(x.shape for x in kinds[:3])), kinds[0].itemsize
        depth = prod(size[each] for each in size if each in a.q and each not in a.table)
        scores = 4 * sizes[0] // itemsize * size[a.keys] // depth
        return _SCORES_HELD[op.kind] * scores if is_cpu else 0
    if op.kind == "ragged_dot_general":  # a masked copy of the rows for each group
        groups = sizes[2] // kinds[2].dtype.itemsize
        has_groups = op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        return groups * (sizes[0] if has_groups else sizes[0] + sizes[1])
    # The place of each window's maximum in every dim; on CPUs of each element, too.
    index = 4 * len(kinds[0].shape) / kinds[0].dtype.itemsize
    return round(sizes[0] * (1 + index) + is_cpu * (sizes[0] + sizes[1] * index))
