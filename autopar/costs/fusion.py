"""Which kernels a compiled program runs, and what each reads and writes.

A model of XLA's fusion, from the plan alone:

  cheap      elementwise and moving operators: done again inside everyone who reads
             them, unless one of the readers needs them in memory
  expensive  transcendental ones: done inside their reader if there is only one
  opaque     products, reductions, collectives, loops: kernels of their own, which read
             memory and write memory

A reduction does one elementwise operator itself. Reshapes and transposes of matrices
are other names for the same memory, and so is what passes a barrier; but nothing is
fused across one, and who reads some of it waits for all. What is left is a list of
kernels for each block, over *values*: a tensor in one spec, in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph.build_graph import BARRIER, PINS, STRUCTURED
from ..graph.op_graph import GraphColumns, Operator
from .compute import TRANSCENDENTAL, is_fusable

_RENAMING = frozenset(
    "copy device_put expand_dims layout_constraint name reshape squeeze"
    " stop_gradient".split()
)
_MOVING = frozenset(
    "concatenate dynamic_slice gather pad rev slice split transpose".split()
)
_REDUCING = ("argmax", "argmin", "reduce_")
_RANDOM = ("random_", "threefry")
_LOOPS = ("random_bits", "threefry2x32")  # on CPUs


@dataclass(frozen=True, eq=False)
class Traits:
    """What operators are to fusion: bool [rows] each, as `graph.columns` has them.

    The results of one that `renames` are other names of what it reads.
    """

    renames: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    is_reducing: np.ndarray

    @classmethod
    def of(cls, columns: GraphColumns) -> Traits:
        """The traits of all operators, found once for those that are alike."""
        found = []
        for op in columns.distinct:
            count = sum(isinstance(operand, int) for operand in op.operands)
            renames = _is_renaming(op) and count == len(op.results)
            found.append((renames, *_classes(op)))
        table = np.array(found, bool).reshape(-1, 4)[columns.alike]
        return cls(*table.T)


@dataclass(frozen=True, eq=False)
class Nodes:
    """Operators and conversions before fusion, in executed order.

    Node n reads the values `reads[read_start[n] : read_start[n + 1]]`, and writes those
    of `writes` likewise. `operator` is -1 for what converts or stores. `absorbs`: it
    reads cheap operands by doing them itself.
    """

    operator: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    absorbs: np.ndarray
    inner_bytes: np.ndarray
    is_send: np.ndarray
    read_start: np.ndarray
    reads: np.ndarray
    write_start: np.ndarray
    writes: np.ndarray

    def __len__(self) -> int:
        return len(self.operator)

    @property
    def is_fusable(self) -> np.ndarray:
        """[nodes]."""
        return self.is_cheap | self.is_expensive

    def makers(self, num_values: int) -> np.ndarray:
        """[values] the node that writes each, or -1."""
        maker = np.full(num_values, -1)
        maker[self.writes] = np.repeat(np.arange(len(self)), np.diff(self.write_start))
        return maker


def values_in_memory(nodes: Nodes, is_kept: np.ndarray) -> np.ndarray:
    """Which values are written to memory: bool [values], given those returned."""
    if not len(nodes):
        return np.ones_like(is_kept)
    num_values, fusable = len(is_kept), nodes.is_fusable
    maker = nodes.makers(num_values)
    reader, value = _used_reads(nodes, maker, is_kept)
    made = maker[value] >= 0
    count = np.bincount(maker[value][made], minlength=len(nodes))
    only = np.zeros(len(nodes), np.intp)  # its reader, if what a node makes has one
    only[maker[value][made]] = reader[made]
    # A reduction does an operator itself, on what is in memory.
    in_reduction = (count == 1) & nodes.absorbs[only] & ~fusable[only]
    absorbs = nodes.absorbs & ~(nodes.is_cheap & in_reduction)

    def has(is_reader: np.ndarray) -> np.ndarray:
        return np.bincount(value[is_reader[reader]], minlength=num_values) > 0

    num_readers = np.bincount(value, minlength=num_values)
    again = nodes.is_expensive[maker] | has(~fusable)
    needed = (num_readers > 0) & (
        ~fusable[maker] | has(~absorbs) | ((num_readers > 1) & again)
    )
    return is_kept | needed | (maker < 0)


def _used_reads(
    nodes: Nodes, maker: np.ndarray, is_kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(node, value) of each that a node reads, without nodes that nothing needs."""
    num_values = len(is_kept)
    reader = np.repeat(np.arange(len(nodes)), np.diff(nodes.read_start))
    pairs = np.unique(reader * num_values + nodes.reads)
    reader, value = pairs // num_values, pairs % num_values
    has_writes = np.diff(nodes.write_start) > 0
    while True:
        wanted = is_kept.copy()
        wanted[value] = True
        is_used = ~has_writes
        is_used[maker[wanted & (maker >= 0)]] = True
        kept = is_used[reader]
        if kept.all():
            return reader, value
        reader, value = reader[kept], value[kept]


def sources(nodes: Nodes, in_memory: np.ndarray) -> list[tuple[int, ...]]:
    """By node, what it reads from memory, through all that it does itself."""
    maker = nodes.makers(len(in_memory)).tolist()
    is_there, reads = in_memory.tolist(), nodes.reads.tolist()
    starts = nodes.read_start.tolist()
    found: list[tuple[int, ...]] = []
    for first, end in zip(starts, starts[1:], strict=False):
        if end - first == 1:
            value = reads[first]
            found.append((value,) if is_there[value] else found[maker[value]])
            continue
        each: dict[int, None] = {}
        for value in reads[first:end]:
            if is_there[value]:
                each[value] = None
            else:
                each.update(dict.fromkeys(found[maker[value]]))
        found.append(tuple(each))
    return found


def sums_nothing(op: Operator) -> bool:
    """Whether a product sums single elements: XLA multiplies instead, and fuses that.

    So the gradients of single examples are made, as in DP-SGD.
    """
    if op.kind != "dot_general":
        return False
    summed = op.params["dimension_numbers"][0][0]
    return all(op.operand_types[0].shape[dim] == 1 for dim in summed)


def _classes(op: Operator) -> tuple[bool, bool, bool]:
    """Whether an operator is cheap, expensive, or a reduction."""
    if op.kind in STRUCTURED or op.kind in _LOOPS:
        return False, False, False
    reducing = op.kind.startswith(_REDUCING)
    expensive = op.kind in TRANSCENDENTAL or op.kind.startswith(_RANDOM)
    fusable = op.kind in _MOVING or is_fusable(op.kind) or sums_nothing(op)
    return fusable and not (expensive or reducing), expensive, reducing


def _is_renaming(op: Operator) -> bool:
    """Whether the results are other names of what is read."""
    if op.kind in _RENAMING or op.kind in (*PINS, BARRIER):
        return True
    if len(op.operands) != 1 or not op.results or op.is_constant(0):
        return False
    source, target = op.operand_types[0], op.result_types[0]
    if op.kind == "broadcast_in_dim":
        return source.size == target.size
    if op.kind == "convert_element_type":
        return source.dtype == target.dtype
    return op.kind == "transpose" and source.rank <= 2
