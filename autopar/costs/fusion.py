"""Which kernels a compiled program runs, and what each reads and writes.

A model of XLA's fusion, from the plan alone:

  cheap      elementwise and moving operators: done again inside everyone who reads
             them. Where a reader needs them in memory, or a way to one is torn
             (`torn_paths.py`), all read them there, but for what reads one array only
             (`repeated.py`) or is made before a reshape (`moved_reshapes.py`)
  opening    pads and concatenations: cheap, but done inside a reader only if that is
             done in one place itself (XLA's `OpInvalidatesCache`)
  expensive  transcendental ones, divisions, gathers and what rounds to bfloat16: done
             inside their reader if there is only one, and that is done in one place
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

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from jax.dtypes import issubdtype

from ..graph.build_graph import BARRIER, PINS, STRUCTURED
from ..graph.op_graph import GraphColumns, Operator
from .compute import TRANSCENDENTAL, is_fusable
from .dim_orders import reordered_operands, sums_nothing
from .moved_reshapes import rows_before_reshapes
from .names import roots
from .repeated import filled_tensors, repeated_rows
from .torn_paths import torn_rows

_RENAMING = frozenset(
    "copy device_put expand_dims layout_constraint name reshape squeeze"
    " stop_gradient".split()
)
CUTTING = ("split", "unstack")
_MOVING = frozenset(
    "concatenate dynamic_slice gather pad rev slice stack transpose".split()
).union(CUTTING)
_JOINING = {"concatenate": "dimension", "stack": "axis"}  # and along what
_OPENING = (*_JOINING, "pad")
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
    concatenates apart from its operands and readers once its result is large. What is
    `repeated` is done again beside what is in memory, what is `torn` only there. One
    that `moves` does not write over what it reads.
    """

    renames: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    is_reducing: np.ndarray
    is_opening: np.ndarray
    joins: np.ndarray
    streams: np.ndarray
    is_streamed: np.ndarray
    moves: np.ndarray
    repeated: np.ndarray
    torn: np.ndarray

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, columns: GraphColumns) -> Traits:
        """The traits of all operators, found once for those that are alike."""
        found = []
        for op in columns.distinct:
            count = sum(isinstance(operand, int) for operand in op.operands)
            renames = _is_renaming(op) and count == len(op.results)
            more = op.kind in _OPENING, _joins_minor_dims(op), *_streaming(op)
            found.append((renames, *_classes(op), *more, op.kind in _MOVING))
        table = np.array(found, bool).reshape(-1, 9)[columns.alike]
        table[_divides_by_shared_scalar(columns), 1:3] = False, True
        renames, is_cheap, is_expensive, *_ = table.T
        is_filled = filled_tensors(columns, renames)
        repeated = repeated_rows(columns, is_filled)
        repeated |= rows_before_reshapes(columns)
        fusable = renames | is_cheap | is_expensive
        again = renames | is_cheap
        own = is_cheap & ~repeated
        torn = torn_rows(columns, fusable, again, own, reordered_operands(columns))
        return cls(*table.T, repeated=repeated, torn=torn)

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
    reads cheap operands by doing them itself. `moves`: it writes elements in places
    other than where it reads them. `streams`: it does only those that are
    `is_streamed`, and have no other reader.
    """

    operator: np.ndarray
    is_cheap: np.ndarray
    is_expensive: np.ndarray
    is_opening: np.ndarray
    streams: np.ndarray
    is_streamed: np.ndarray
    absorbs: np.ndarray
    repeated: np.ndarray
    torn: np.ndarray
    moves: np.ndarray
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


@dataclass(frozen=True, eq=False)
class InMemory:
    """Which values are written to memory, bool [values] each, and who reads them there.

    Of those done `again` they are only the nodes that cannot do so, or nobody; those
    `alone` are done again by nodes of nothing else. `streams` [nodes]: they do only
    what is streamed too.
    """

    is_written: np.ndarray
    again: np.ndarray
    alone: np.ndarray
    streams: np.ndarray

    def without(self, others: np.ndarray) -> InMemory:
        """Without other names of values, bool [values]."""
        return replace(self, is_written=self.is_written & ~others)

    def made_once(self, values: Sequence[int]) -> InMemory:
        """With values that are not done again, as they pass a barrier."""
        again = self.again.copy()
        again[values] = False
        return replace(self, again=again)

    def is_inside(self, nodes: Nodes, maker: np.ndarray) -> np.ndarray:
        """[reads] what a node does itself, though it may be in memory."""
        reader = np.repeat(np.arange(len(nodes)), np.diff(nodes.read_start))
        made = maker[nodes.reads]
        own = nodes.absorbs[reader] & (~self.streams[reader] | self.streams[made])
        again = self.again[nodes.reads] & (
            ~self.alone[nodes.reads] | self._is_alone(nodes)[reader]
        )
        return ~self.is_written[nodes.reads] | (again & own)

    def _is_alone(self, nodes: Nodes) -> np.ndarray:
        """[nodes] that read one value and write one to memory."""
        one = (np.diff(nodes.read_start) == 1) & (np.diff(nodes.write_start) == 1)
        one[one] = self.is_written[nodes.writes[nodes.write_start[:-1][one]]]
        return one


def values_in_memory(nodes: Nodes, is_kept: np.ndarray) -> InMemory:
    """Which values are written to memory, given those returned (bool [values])."""
    if not len(nodes):
        nothing = np.zeros(len(is_kept), bool)
        return InMemory(np.ones_like(is_kept), nothing, nothing, np.zeros(0, bool))
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
    again = nodes.is_expensive[maker] | nodes.torn[maker]
    again |= has(~fusable) & ~nodes.repeated[maker]
    needed = (num_readers > 0) & (
        ~fusable[maker] | has(~nodes.absorbs) | ((num_readers > 1) & again)
    )
    apart = streams[reader] & ~streams[maker[value]]
    needed |= np.bincount(value[apart], minlength=num_values) > 0
    found = is_kept | needed | (maker < 0)
    again = nodes.is_cheap[maker] & nodes.repeated[maker] & (maker >= 0)
    _put_opened(nodes, maker, (reader, value), found, again)
    repeated = found & again
    return InMemory(found, repeated, repeated & nodes.is_opening[maker], streams)


def _put_opened(
    nodes: Nodes,
    maker: np.ndarray,
    reads: tuple[np.ndarray, np.ndarray],
    in_memory: np.ndarray,
    again: np.ndarray,
) -> None:
    """Puts in memory what is opening or expensive and would be done in several places.

    Args:
      nodes: all of them.
      maker: [values] the node that writes each, or -1.
      reads: (node, value) of each that a node reads.
      in_memory: [values] changed in place.
      again: [values] what is done again though it is in memory.
    """
    reader, value = reads
    is_once = nodes.is_opening | nodes.is_expensive
    asked = np.flatnonzero(~in_memory & is_once[maker])
    if not asked.size:
        return
    count = np.bincount(value, minlength=len(in_memory))
    only, made_next = np.zeros(len(in_memory), np.intp), np.arange(len(in_memory))
    only[value] = reader  # its reader, if it has one
    passes = (count == 1) & (np.diff(nodes.write_start)[only] > 0)  # and is not stored
    made_next[passes] = nodes.writes[nodes.write_start[only[passes]]]
    passes_asked = asked[passes[asked]]
    name = np.where(in_memory, np.arange(len(in_memory)), made_next)
    name[asked] = asked
    ends = roots(name)[made_next[passes_asked]]  # in memory, asked for or read by many
    following = dict(zip(passes_asked.tolist(), ends.tolist(), strict=True))
    is_absorbed = np.bincount(value[nodes.absorbs[reader]], minlength=len(count)) > 0
    repeats, is_shared = (again & is_absorbed).tobytes(), (count > 1).tobytes()
    is_there = bytearray(in_memory.tobytes())
    for each in asked[np.argsort(-maker[asked], kind="stable")].tolist():
        made = each
        while made in following and not is_there[made]:
            made = following[made]
        is_there[each] = repeats[made] if is_there[made] else is_shared[made]
    in_memory[:] = np.frombuffer(is_there, bool)


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

    Who divides by what is smaller than the result multiplies by its reciprocal; but see
    `_divides_by_shared_scalar`.
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


def _divides_by_shared_scalar(columns: GraphColumns) -> np.ndarray:
    """bool [rows], those whose divisor is a scalar that is read elsewhere, too.

    The reciprocal of such a one is not taken.
    """
    divides = columns.where(lambda op: op.kind == "div" and op.result_types[0].size > 1)
    rows = np.flatnonzero(divides)
    divisor = columns.operands[columns.operand_start[rows] + 1]
    reads = np.bincount(columns.operands + 1, minlength=len(columns.type_of) + 1)
    ranks = np.array([kind.rank for kind in columns.types], np.intp)[columns.type_of]
    divides[rows] = (divisor >= 0) & (ranks[divisor] == 0) & (reads[divisor + 1] > 1)
    return divides


def _streaming(op: Operator) -> tuple[bool, bool]:
    """Whether an operator reduces floats, and whether such reductions can do it."""
    kinds = (*op.operand_types, *op.result_types)
    if not all(issubdtype(kind.dtype, np.floating) for kind in kinds):
        return False, False
    return op.kind in _STREAMING, op.kind in _STREAMED


def _joins_minor_dims(op: Operator) -> bool:
    """Whether many arrays, or long rows, are concatenated."""
    if op.kind not in _JOINING:
        return False
    kind, dim = op.result_types[0], op.params[_JOINING[op.kind]]
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
