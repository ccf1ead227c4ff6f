"""Which kernels a compiled program runs, and what each reads and writes.

A model of XLA's fusion, from the plan alone:

  cheap      elementwise and moving operators: done again inside everyone who reads
             them, unless one of the readers needs them in memory
  opening    pads and concatenations: cheap, but done inside a reader only if that is
             done in one place itself (XLA's `OpInvalidatesCache`)
  expensive  transcendental ones, divisions, gathers and what rounds to bfloat16: done
             inside their reader if there is only one
  opaque     products, reductions, collectives, loops: kernels of their own, which read
             memory and write memory; so are long concatenations of minor dims

A reduction of many floats does what it reads itself as far as that is arithmetic that
nothing else reads (YNNPACK's), a small one whatever can be fused. Reshapes and
transposes of matrices are other names for the same memory, and so is what passes a
barrier; but nothing is fused across one, and who reads some of it waits for all. What
is left is a list of kernels for each block, over *values*: a tensor in one spec, in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from jax.dtypes import issubdtype

from ..graph.build_graph import BARRIER, PINS, STRUCTURED
from ..graph.op_graph import GraphColumns, Operator
from .compute import TRANSCENDENTAL, is_fusable
from .names import roots

_RENAMING = frozenset(
    "copy device_put expand_dims layout_constraint name reshape squeeze"
    " stop_gradient".split()
)
_MOVING = frozenset(
    "concatenate dynamic_slice gather pad rev slice split transpose".split()
)
_OPENING = ("concatenate", "pad")
_INEXPENSIVE = ("cos", "sin", "tan")
_REDUCING = ("argmax", "argmin", "reduce_")
_STREAMING = ("reduce_max", "reduce_min", "reduce_sum")
_STREAMED = frozenset(
    "abs add add_any broadcast_in_dim ceil convert_element_type cos div erf exp expm1"
    " floor integer_pow log log1p logistic max min mul neg pad pow round rsqrt sign sin"
    " sqrt square sub tan tanh".split()
)
_STREAMED_BYTES = 16384  # what a reduction reads at least
_RANDOM = ("random_", "threefry")
_LOOPS = ("random_bits", "threefry2x32")  # on CPUs
_ROW_BYTES = 64  # what a concatenation of minor dims is done apart from, and
_JOINED_BYTES = 2048  # in all
_MOST_JOINED = 8


@dataclass(frozen=True, eq=False)
class Traits:
    """What operators are to fusion: bool [rows] each, as `graph.columns` has them.

    The results of one that `renames` are other names of what it reads. One that `joins`
    concatenates apart from its operands and readers once its result is large.
    """

    renames: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    is_reducing: np.ndarray
    is_opening: np.ndarray
    joins: np.ndarray
    streams: np.ndarray
    is_streamed: np.ndarray

    @classmethod
    def of(cls, columns: GraphColumns) -> Traits:
        """The traits of all operators, found once for those that are alike."""
        found = []
        for op in columns.distinct:
            count = sum(isinstance(operand, int) for operand in op.operands)
            renames = _is_renaming(op) and count == len(op.results)
            more = op.kind in _OPENING, _joins_minor_dims(op), *_streaming(op)
            found.append((renames, *_classes(op), *more))
        table = np.array(found, bool).reshape(-1, 8)[columns.alike]
        return cls(*table.T)

    def among(
        self, rows: np.ndarray, read_bytes: np.ndarray, made_bytes: np.ndarray
    ) -> Traits:
        """The traits of some rows, with what they read and make on one device."""
        chosen = {each.name: getattr(self, each.name)[rows] for each in fields(self)}
        own = Traits(**chosen)
        apart = own.joins & (made_bytes >= _JOINED_BYTES)
        return replace(
            own,
            is_cheap=own.is_cheap & ~apart,
            is_opening=own.is_opening & ~apart,
            streams=own.streams & (read_bytes >= _STREAMED_BYTES),
        )


@dataclass(frozen=True, eq=False)
class Nodes:
    """Operators and conversions before fusion, in executed order.

    Node n reads the values `reads[read_start[n] : read_start[n + 1]]`, and writes those
    of `writes` likewise. `operator` is -1 for what converts or stores. `absorbs`: it
    reads cheap operands by doing them itself. `streams`: it does only those that are
    `is_streamed`, and have no other reader.
    """

    operator: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    is_opening: np.ndarray
    streams: np.ndarray
    is_streamed: np.ndarray
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
    streams = nodes.streams
    while True:
        more = streams | ((count == 1) & nodes.is_streamed & streams[only])
        if (more == streams).all():
            break
        streams = more

    def has(is_reader: np.ndarray) -> np.ndarray:
        return np.bincount(value[is_reader[reader]], minlength=num_values) > 0

    num_readers = np.bincount(value, minlength=num_values)
    again = nodes.is_expensive[maker] | has(~fusable)
    needed = (num_readers > 0) & (
        ~fusable[maker] | has(~nodes.absorbs) | ((num_readers > 1) & again)
    )
    apart = streams[reader] & ~streams[maker[value]]
    needed |= np.bincount(value[apart], minlength=num_values) > 0
    found = is_kept | needed | (maker < 0)
    _put_opened(nodes, maker, (reader, value), found)
    return found


def _put_opened(
    nodes: Nodes,
    maker: np.ndarray,
    reads: tuple[np.ndarray, np.ndarray],
    in_memory: np.ndarray,
) -> None:
    """Puts in memory what is padded or concatenated for several places.

    Args:
      nodes: all of them.
      maker: [values] the node that writes each, or -1.
      reads: (node, value) of each that a node reads.
      in_memory: [values] changed in place.
    """
    reader, value = reads
    opened = np.flatnonzero(~in_memory & nodes.is_opening[maker])
    if not opened.size:
        return
    order = np.argsort(value, kind="stable")
    starts = np.searchsorted(value[order], np.arange(len(in_memory) + 1)).tolist()
    readers, write_start = reader[order].tolist(), nodes.write_start.tolist()
    for each in opened[np.argsort(-maker[opened], kind="stable")].tolist():
        made = each
        while not in_memory[made] and starts[made + 1] - starts[made] == 1:
            node = readers[starts[made]]
            if write_start[node] == write_start[node + 1]:
                break  # stored
            made = nodes.writes[write_start[node]]
        in_memory[each] = not in_memory[made] and starts[made + 1] - starts[made] > 1


def _used_reads(
    nodes: Nodes, maker: np.ndarray, is_kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(node, value) of each that a node reads, without nodes that nothing needs."""
    num_values = len(is_kept)
    reader = np.repeat(np.arange(len(nodes)), np.diff(nodes.read_start))
    pairs = np.sort(reader * num_values + nodes.reads, kind="stable")
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    reader, value = np.divmod(pairs, num_values)
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


def sources(
    nodes: Nodes, in_memory: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What nodes read from memory, through all that they do themselves.

    Args:
      nodes: all of them.
      in_memory: bool [values].
      chosen: the nodes that are asked for.

    Returns:
      starts, reads: chosen node k reads `reads[starts[k] : starts[k + 1]]`.
    """
    maker = nodes.makers(len(in_memory))
    read = _through_single_reads(nodes, maker, in_memory)[nodes.reads]
    counts = np.diff(nodes.read_start)
    reader = np.repeat(np.arange(len(nodes)), counts)
    pairs = np.sort(reader * len(in_memory) + read)
    reads_twice = pairs[1:][np.diff(pairs) == 0] // len(in_memory)
    is_mixed = np.bincount(reader[~in_memory[read]], minlength=len(nodes)) > 0
    is_mixed[reads_twice] = True
    is_asked = np.zeros(len(nodes), bool)
    is_asked[chosen] = True
    is_mixed &= is_asked | (counts > 1)  # the others are read through
    mixed = _mixed_sources(nodes, read, maker, in_memory, is_mixed)
    counts[list(mixed)] = [len(each) for each in mixed.values()]
    starts = np.concatenate([[0], np.cumsum(counts[chosen])])
    taken = np.repeat(is_mixed[chosen], counts[chosen])
    found = np.empty(starts[-1], np.intp)
    found[~taken] = read[(is_asked & ~is_mixed)[reader]]
    among = chosen[is_mixed[chosen]].tolist()
    found[taken] = np.array([v for node in among for v in mixed[node]], np.intp)
    return starts, found


def _through_single_reads(
    nodes: Nodes, maker: np.ndarray, in_memory: np.ndarray
) -> np.ndarray:
    """[values] themselves, or what they are made of if that is one value."""
    passes = np.flatnonzero(~in_memory & (np.diff(nodes.read_start)[maker] == 1))
    name = np.arange(len(in_memory))
    name[passes] = nodes.reads[nodes.read_start[maker[passes]]]
    return roots(name)


def _mixed_sources(
    nodes: Nodes,
    read: np.ndarray,
    maker: np.ndarray,
    in_memory: np.ndarray,
    is_mixed: np.ndarray,
) -> dict[int, tuple[int, ...]]:
    """By node that `is_mixed`, what it reads from memory, each once."""
    starts, reads = nodes.read_start.tolist(), read.tolist()
    is_there, made_by = in_memory.tolist(), maker.tolist()
    found: dict[int, tuple[int, ...]] = {}
    for node in np.flatnonzero(is_mixed).tolist():
        each = list[int]()
        for value in reads[starts[node] : starts[node + 1]]:
            if is_there[value]:
                each.append(value)
                continue
            made = made_by[value]
            inside = found.get(made)
            each += reads[starts[made] : starts[made + 1]] if inside is None else inside
        found[node] = tuple(dict.fromkeys(each)) if len(each) > 1 else tuple(each)
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
    expensive = op.kind.startswith(_RANDOM) or _is_expensive(op)
    fusable = op.kind in _MOVING or is_fusable(op.kind) or sums_nothing(op)
    return fusable and not (expensive or reducing), expensive, reducing


def _is_expensive(op: Operator) -> bool:
    """Whether XLA's `CpuInstructionFusion` does not repeat the operator.

    Who divides by what is smaller than the result multiplies by its reciprocal.
    """
    if op.kind == "div":
        kind = op.result_types[0]
        is_whole = op.operand_types[1].size == kind.size and not op.is_constant(1)
        return is_whole and kind.size > 1 and np.dtype(kind.dtype).kind != "i"
    if op.kind == "convert_element_type":
        return str(op.result_types[0].dtype) == "bfloat16"
    if op.kind == "gather":
        return True
    return op.kind in TRANSCENDENTAL and op.kind not in _INEXPENSIVE


def _streaming(op: Operator) -> tuple[bool, bool]:
    """Whether an operator reduces floats, and whether such reductions can do it."""
    kinds = (*op.operand_types, *op.result_types)
    if not all(issubdtype(kind.dtype, np.floating) for kind in kinds):
        return False, False
    return op.kind in _STREAMING, op.kind in _STREAMED


def _joins_minor_dims(op: Operator) -> bool:
    """Whether many arrays, or long rows, are concatenated."""
    if op.kind != "concatenate":
        return False
    kind, dim = op.result_types[0], op.params["dimension"]
    row_bytes = kind.shape[dim] * kind.bytes // max(kind.size, 1)
    is_minor = dim == kind.rank - 1 > 0 and row_bytes >= _ROW_BYTES
    return is_minor or len(op.operands) > _MOST_JOINED


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
