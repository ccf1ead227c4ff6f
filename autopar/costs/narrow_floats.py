"""What CPUs compute in float32 though it is narrower in the program.

XLA's `FloatNormalization`, as its compiler for CPUs asks for it: products, reductions
and collectives of bfloat16 read float32 copies of their operands, and write float32
that is rounded afterwards. The copies are shared among those who read them. What is
elementwise does so within its kernel, but who rounds is not done again in every reader.
Products that are asked for float32 read bfloat16 as it is. Of float16 only products are
computed so, as its pass `ChangeOpDataType` is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..graph.build_graph import BARRIER, PINS
from ..graph.op_graph import GraphColumns, Operator
from .fusion import Nodes, Traits
from .kernels import ValueColumns, gathers_minor
from .node_table import NodeTable

NARROW = "bfloat16"
NARROW_IN_PRODUCTS = "float16"
PRODUCTS = "dot_general", "conv_general_dilated", "ragged_dot_general"
TIMES_WIDER = 2


@lru_cache(maxsize=8)
def tensors_of(columns: GraphColumns, dtype: str) -> np.ndarray:
    """bool [tensors + 1], those of a dtype; the last is what is no tensor."""
    is_such = np.array([str(kind.dtype) == dtype for kind in columns.types], bool)
    return np.append(is_such[columns.type_of], False)


def has_narrow(columns: GraphColumns) -> bool:
    """Whether there are tensors that CPUs may copy to float32."""
    dtypes = NARROW, NARROW_IN_PRODUCTS
    return any(tensors_of(columns, dtype).any() for dtype in dtypes)


def rounding_traits(traits: Traits, columns: GraphColumns) -> Traits:
    """The traits of all rows where what is elementwise rounds to bfloat16."""
    narrow = tensors_of(columns, NARROW)
    rounds = np.zeros(len(columns.operators), bool)
    rounds[columns.rows_of_results[narrow[columns.results]]] = True
    rounds &= traits.is_cheap & ~_fills(columns)
    return replace(
        traits,
        is_cheap=traits.is_cheap & ~rounds,
        is_expensive=traits.is_expensive | rounds,
    )


@dataclass(frozen=True, eq=False)
class Widened:
    """Nodes and values of a block with wide copies.

    The copies are the last of `values`; `of` has, for each, what it is a copy of.
    `flat` are those that lie in another order of dims than what is made of them.
    """

    nodes: Nodes
    values: ValueColumns
    of: Mapping[int, int] = field(default_factory=dict[int, int])
    flat: frozenset[int] = frozenset()


def with_wide_copies(
    nodes: Nodes,
    values: ValueColumns,
    columns: GraphColumns,
    named: Mapping[int, int],
    of_loops: Mapping[int, Collection[int]],
    is_wide: Collection[int],
) -> Widened:
    """The copies and what rounds, beside the nodes and values of a block.

    Args:
      nodes: before fusion.
      values: what they read and write.
      columns: of the graph.
      named: by value, the one that it is another name of once that is in memory.
      of_loops: by loop, values that it reads in every iteration, in whole or in part;
        their copies are made before it runs.
      is_wide: values that were copied outside.
    """
    reader = np.repeat(np.arange(len(nodes)), np.diff(nodes.read_start))
    writer = np.repeat(np.arange(len(nodes)), np.diff(nodes.write_start))
    is_read, is_rounded = np.zeros(len(reader), bool), np.zeros(len(writer), bool)
    before_loops = _in_loops(nodes, reader, of_loops)
    for dtype, computes in _computing(nodes, columns):
        is_narrow = tensors_of(columns, dtype)[values.tensor]
        is_read |= is_narrow[nodes.reads] & (computes[reader] | before_loops)
        is_rounded |= is_narrow[nodes.writes] & computes[writer]
    is_read &= ~np.isin(nodes.reads, list(is_wide))
    widened, rounded = np.flatnonzero(is_read), np.flatnonzero(is_rounded)
    if not len(widened) and not len(rounded):
        return Widened(nodes, values)
    name = np.arange(len(values))
    name[list(named)] = list(named.values())
    source, first, copy = np.unique(
        name[nodes.reads[widened]], return_index=True, return_inverse=True
    )
    target, count = nodes.writes[rounded], len(values)
    more = np.concatenate([source, target])
    own = count + np.arange(len(more))
    reads, writes = nodes.reads.copy(), nodes.writes.copy()
    reads[widened], writes[rounded] = own[copy], own[len(source) :]
    inner = nodes.inner_bytes.copy()
    turned = widened[inner[reader[widened]] == values.bytes[nodes.reads[widened]]]
    inner[reader[turned]] = 0  # the wide copy is made in that order
    table = NodeTable()
    table.add_nodes(replace(nodes, reads=reads, writes=writes, inner_bytes=inner))
    place = np.arange(len(source)), np.arange(len(target))
    table.add(
        reader[widened[first]] - 0.5,
        cheap=True,
        absorbs=True,
        streamed=True,
        repeated=True,
        reads=(place[0], source),
        writes=(place[0], own[: len(source)]),
    )
    table.add(
        writer[rounded] + 0.5,
        expensive=True,
        absorbs=True,
        reads=(place[1], own[len(source) :]),
        writes=(place[1], target),
    )
    apart = _gathered_minor(nodes, values, writer[rounded], target)
    apart |= np.isin(target, nodes.reads[turned])
    apart = own[len(source) :][apart]
    return Widened(
        table.build(),
        values.with_copies(more, times_wider=TIMES_WIDER),
        dict(zip(own.tolist(), more.tolist(), strict=True)),
        frozenset(apart.tolist()),
    )


def _gathered_minor(
    nodes: Nodes, values: ValueColumns, made_by: np.ndarray, made: np.ndarray
) -> np.ndarray:
    """Which of the values `made` are gathered along a dim that is not the major one."""
    if not values.specs:
        return np.zeros(len(made), bool)
    read, specs = nodes.reads[nodes.read_start[made_by]], np.array(values.specs)
    is_gathered = gathers_minor(specs[values.spec[read]], specs[values.spec[made]])
    return (nodes.operator[made_by] < 0) & is_gathered


def _in_loops(
    nodes: Nodes, reader: np.ndarray, of_loops: Mapping[int, Collection[int]]
) -> np.ndarray:
    """bool [reads], those of loops that are copied before these run."""
    found = np.zeros(len(reader), bool)
    for operator, read in of_loops.items():
        own = nodes.operator[reader] == operator
        found[own] = np.isin(nodes.reads[own], list(read))
    return found


def _computing(nodes: Nodes, columns: GraphColumns) -> Iterator[tuple[str, np.ndarray]]:
    """Dtypes and bool [nodes], those that read and write float32 instead of them."""
    row_of = np.full(int(columns.index.max(initial=-1)) + 2, -1)
    row_of[columns.index] = np.arange(len(columns.index))
    row = row_of[nodes.operator]
    moves = (np.diff(nodes.read_start) > 0) & (np.diff(nodes.write_start) > 0)
    is_apart = ~nodes.is_fusable & moves
    widens = np.append(columns.where(_widens), True)  # the last: what converts
    yield NARROW, widens[row] & is_apart
    multiplies = np.append(columns.where(_multiplies_float16), False)
    yield NARROW_IN_PRODUCTS, multiplies[row] & is_apart


def _widens(op: Operator) -> bool:
    """Whether an operator, where it is a kernel, computes bfloat16 in float32."""
    if op.bodies or op.kind in (BARRIER, *PINS):
        return False
    return op.kind != "dot_general" or _makes(op, NARROW)


def _multiplies_float16(op: Operator) -> bool:
    return op.kind in PRODUCTS and _makes(op, NARROW_IN_PRODUCTS)


def _makes(op: Operator, dtype: str) -> bool:
    return any(str(kind.dtype) == dtype for kind in op.result_types)


def _fills(columns: GraphColumns) -> np.ndarray:
    return columns.where(lambda op: op.kind in ("broadcast_in_dim", "iota"))
