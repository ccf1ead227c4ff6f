"""What products, convolutions and scatters read in an order of dims of their own.

What lies otherwise (`dim_orders.py`) is copied, by a kernel that does cheap operators
itself; those that read it in the same order share the copy. What a collective gathers
along a dim that is not the major one lies with that first, what `gather` makes with its
offsets last. Where the order is right a value is only named anew, but what is cheap is
then done for that name too, so it is made in each order from what it reads. Operands
that are matrices are read as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..graph.op_graph import GraphColumns, Operator
from ..sharding.spec import local_shape
from .dim_orders import (
    as_they_lie,
    is_convolution,
    lies_turned,
    sums_nothing,
    wanted_orders,
)
from .kernels import ValueColumns
from .node_table import NodeTable
from .plan_arrays import PlanArrays


class Ordered(NamedTuple):
    """`value`, which is `tensor` in `spec`, for the entries `reads` of a block's reads.

    The first of them is of row `row`. `is_turned`: it does not lie in that order;
    `is_relaid`: only because of how it was gathered.
    """

    row: int
    value: int
    tensor: int
    spec: int
    is_turned: bool
    is_relaid: bool
    reads: tuple[int, ...]


def ordered_operands(
    arrays: PlanArrays,
    rows: slice,
    read_start: np.ndarray,
    read_spec: np.ndarray,
    read: np.ndarray,
    gathered: np.ndarray,
    turned: np.ndarray,
) -> list[Ordered]:
    """What products of a block read in an order of their own.

    Row k of the block, the graph's row `rows.start + k`, reads the values
    `read[read_start[k] : read_start[k + 1]]`, in specs likewise. `gathered` are
    the values that are so along a dim that is not the major one, `turned` others that
    lie in another order of dims than their own.
    """
    sizes, columns = arrays.plan.mesh.axis_sizes, arrays.columns
    alike, specs = columns.alike.tolist(), read_spec.tolist()
    known: dict[
        tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...], bool]
    ] = {}
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    is_apart = np.isin(read, np.concatenate([gathered, turned]))
    wanted = wanted_orders(columns)
    for row in _reading_in_order(columns, rows, read_start, is_apart):
        op, at = columns.operators[row], int(read_start[row - rows.start])
        orders = wanted.get(row) or as_they_lie(op)
        for side, order in enumerate(orders):
            tensor = op.operands[side]
            if not isinstance(tensor, int):
                continue
            kind = alike[row], side, specs[at]
            if kind not in known:
                shape = op.operand_types[side].shape
                local = local_shape(shape, arrays.specs[kind[2]], sizes)
                dims = tuple(dim for dim in order.dims if local[dim] > 1)
                known[kind] = local, dims, order.is_named(local)
            local, dims, is_named = known[kind]
            if is_named or is_apart[at]:
                key = int(read[at]), local, dims
                found.setdefault(key, []).append(at)
                first.setdefault(key, (row - rows.start, tensor))
            at += 1
    ordered, relaid = list[Ordered](), set(gathered.tolist())
    for (value, local, dims), reads in found.items():
        row, tensor = first[value, local, dims]
        is_in_place = list(dims) == sorted(dims)
        is_turned = not is_in_place or bool(is_apart[reads[0]])
        is_relaid = is_in_place and value in relaid
        own = row, value, tensor, int(read_spec[reads[0]])
        ordered.append(Ordered(*own, is_turned, is_relaid, tuple(reads)))
    return ordered


def _reading_in_order(
    columns: GraphColumns, rows: slice, read_start: np.ndarray, is_apart: np.ndarray
) -> list[int]:
    """Rows of a block that read in orders of their own, or [reads] what lies apart."""
    found = {row for row in wanted_orders(columns) if rows.start <= row < rows.stop}
    before = np.concatenate([[0], np.cumsum(is_apart)])[read_start]
    count = rows.stop - rows.start
    reads_apart = before[1 : count + 1] > before[:count]
    reads_apart &= columns.where(lambda op: is_product(op) or is_convolution(op))[rows]
    return sorted(found.union((np.flatnonzero(reads_apart) + rows.start).tolist()))


def with_ordered(
    ordered: Sequence[Ordered], values: ValueColumns, read: np.ndarray
) -> tuple[ValueColumns, np.ndarray]:
    """Values with those of `ordered` at the end, and reads of these."""
    if not ordered:
        return values, read
    read = read.copy()
    for value, each in enumerate(ordered, len(values)):
        read[list(each.reads)] = value
    more = values.with_copies(
        [each.value for each in ordered],
        tensor=[each.tensor for each in ordered],
        spec=[each.spec for each in ordered],
    )
    return more, read


def add_ordered(ordered: Sequence[Ordered], num_values: int, table: NodeTable) -> None:
    """Nodes that make them, the last of `num_values`, before the rows that read."""
    own = np.arange(len(ordered))
    table.add(
        2 * np.array([each.row for each in ordered], np.intp),
        cheap=True,
        absorbs=True,
        moves=np.array([each.is_turned for each in ordered], bool),
        reads=(own, np.array([each.value for each in ordered], np.intp)),
        writes=(own, num_values - len(ordered) + own),
    )


def names_in_order(ordered: Sequence[Ordered], in_memory: np.ndarray) -> np.ndarray:
    """[values] themselves, or what lies in that order in memory already.

    `ordered` are the last of `in_memory` [values]. Products read such names themselves,
    so what is in memory stays there.
    """
    name = np.arange(len(in_memory))
    for value, each in enumerate(ordered, len(name) - len(ordered)):
        if not each.is_turned and in_memory[each.value]:
            name[value] = each.value
    return name


def names_of(ordered: Sequence[Ordered], num_values: int) -> dict[int, int]:
    """By value of `ordered`, the last of `num_values`, what it only names anew."""
    places = enumerate(ordered, num_values - len(ordered))
    return {value: each.value for value, each in places if not each.is_turned}


def relaid(ordered: Sequence[Ordered], first: int) -> dict[int, int]:
    """By value of `ordered`, from `first` on, the gathered one that it is a copy of."""
    places = enumerate(ordered, first)
    return {value: each.value for value, each in places if each.is_relaid}


def is_product(op: Operator) -> bool:
    """Whether an operator is a product that sums something."""
    return op.kind == "dot_general" and not sums_nothing(op)


def flat_values(
    columns: GraphColumns, rows: slice, result_row: np.ndarray, values: np.ndarray
) -> frozenset[int]:
    """Those of `values`, made by rows of a block, that are written as matrices.

    Elementwise kernels that read them in their own dims do not write over them.
    """
    return frozenset(values[_flat_rows(columns)[rows][result_row]].tolist())


def turned_values(
    columns: GraphColumns, rows: slice, result_row: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Those of `values`, made by rows of a block, that lie in another order of dims."""
    return values[columns.where(lies_turned)[rows][result_row]]


@lru_cache(maxsize=4)
def _flat_rows(columns: GraphColumns) -> np.ndarray:
    """bool [rows], those of products that write several dims of an operand as one."""
    found = [is_product(op) and _joins_dims(op) for op in columns.distinct]
    return np.array(found, bool)[columns.alike]


def _joins_dims(op: Operator) -> bool:
    summed, batch = op.params["dimension_numbers"]
    return any(
        kind.rank - len(b) - len(c) > 1
        for kind, b, c in zip(op.operand_types, batch, summed, strict=False)
    )
