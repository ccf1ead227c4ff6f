"""In which order of dims products, convolutions and scatters read, in XLA for CPUs.

Convolutions (`ConvCanonicalization`) read images with the batch first and channels
last, kernels with the channels last. A product (`DotDecomposer`) with several dims to
sum, or several of an operand's own, is made one of matrices: the left operand's dims
come in the order batch, own, summed, the right one's in batch, summed, own. Matrices of
a batch that only lie the other way round are read as they are (`TransposeFolding`).
Scatters read updates, and gathers write results, with the dims of a window or offset
last (`ScatterSimplifier`, `GatherSimplifier`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..graph.op_graph import GraphColumns, Operator
from .loop_operands import is_scatter


@dataclass(frozen=True)
class DimOrder:
    """`dims` of an operand in the order in which it is read; some may be joined."""

    dims: tuple[int, ...]
    is_joined: bool

    def is_turned(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this (local) shape does not lie in that order."""
        dims = [dim for dim in self.dims if shape[dim] > 1]
        return dims != sorted(dims)

    def is_named(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this (local) shape is read under another name at least.

        That of a matrix is its own.
        """
        return len(shape) > 2 and (self.is_joined or self.is_turned(shape))


@lru_cache(maxsize=4)
def wanted_orders(columns: GraphColumns) -> dict[int, tuple[DimOrder, ...]]:
    """By row of the graph, the orders of the operands of a product or scatter.

    Only convolutions, scatters, and products that are not of matrices, are there.
    """
    found = [_wanted(op) for op in columns.distinct]
    is_there = np.array([orders is not None for orders in found], bool)
    rows = np.flatnonzero(is_there[columns.alike])
    orders = [found[k] for k in columns.alike[rows].tolist()]
    return {
        row: each
        for row, each in zip(rows.tolist(), orders, strict=True)
        if each is not None
    }


@lru_cache(maxsize=4)
def reordered_operands(columns: GraphColumns) -> np.ndarray:
    """bool [operands], those read under another name or as a copy in another order."""
    found = np.zeros(len(columns.operands), bool)
    for row, orders in wanted_orders(columns).items():
        op, first = columns.operators[row], int(columns.operand_start[row])
        for side, order in enumerate(orders):
            found[first + side] = order.is_named(op.operand_types[side].shape)
    return found


def as_they_lie(op: Operator) -> tuple[DimOrder, ...]:
    """The orders of both operands of a product that reads them as they are."""
    return tuple(DimOrder(tuple(range(x.rank)), False) for x in op.operand_types[:2])


def is_convolution(op: Operator) -> bool:
    return op.kind == "conv_general_dilated"


def sums_nothing(op: Operator) -> bool:
    """Whether a product sums single elements: XLA multiplies instead, and fuses that.

    So the gradients of single examples are made, as in DP-SGD.
    """
    if op.kind != "dot_general":
        return False
    summed = op.params["dimension_numbers"][0][0]
    return all(op.operand_types[0].shape[dim] == 1 for dim in summed)


def _wanted(op: Operator) -> tuple[DimOrder, ...] | None:
    """The order of each operand's dims, or None for what reads them as they are."""
    if is_convolution(op) and op.params["batch_group_count"] == 1:
        image, kernel, _ = op.params["dimension_numbers"]
        out_channel, in_channel, *window = kernel
        orders = (image[0], *image[2:], image[1]), (*window, in_channel, out_channel)
        return tuple(DimOrder(dims, False) for dims in orders)
    if is_scatter(op):
        window = op.params["dimension_numbers"].update_window_dims
        return *as_they_lie(op), _leading_last(op.operand_types[2].rank, window)
    if op.kind != "dot_general" or sums_nothing(op):
        return None
    summed, batch = op.params["dimension_numbers"]
    ranks = [len(kind.shape) for kind in op.operand_types[:2]]
    sides = list(zip(batch, summed, ranks, strict=True))
    if all(
        tuple(b) == tuple(range(len(b))) and len(c) <= 1 and rank <= len(b) + 2
        for b, c, rank in sides
    ):
        return None
    own = [[d for d in range(r) if d not in b and d not in c] for b, c, r in sides]
    left, right = sides
    orders = (*left[0], *own[0], *left[1]), (*right[0], *right[1], *own[1])
    return tuple(
        DimOrder(_folded(dims, len(b)), len(each) > 1 or len(c) > 1)
        for dims, each, (b, c, _) in zip(orders, own, sides, strict=True)
    )


def lies_turned(op: Operator) -> bool:
    """Whether a gather's result lies in another order of dims than its own."""
    if op.kind != "gather":
        return False
    made, offset = op.result_types[0], op.params["dimension_numbers"].offset_dims
    return _leading_last(made.rank, offset).is_turned(made.shape)


def _leading_last(rank: int, last: Sequence[int]) -> DimOrder:
    """Some dims behind all others."""
    return DimOrder((*(dim for dim in range(rank) if dim not in last), *last), False)


def _folded(dims: tuple[int, ...], num_batch: int) -> tuple[int, ...]:
    """An order of dims, in place if only the rows and columns of matrices change."""
    *batch, row, column = dims if len(dims) == num_batch + 2 else (-1, -1, -1)
    is_swapped = batch == list(range(num_batch)) and row == column + 1 == len(dims) - 1
    return tuple(range(len(dims))) if is_swapped else dims
