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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..graph.build_graph import BARRIER, PINS, SCAN, STRUCTURED, WHILE
from ..graph.op_graph import Block, Operator, OpGraph
from ..plans.plan import OperatorPlan, ShardingPlan
from ..sharding.spec import REPLICATED, Spec, num_shards
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


@dataclass(frozen=True)
class Value:
    """A tensor in one spec, as one device holds it.

    `is_copy`: it is not made in that spec. `is_outside`: its memory is not this block's
    but an argument's or that of a loop's operand.
    """

    tensor: int
    spec: Spec
    bytes: int
    is_copy: bool
    is_outside: bool = False


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: the values it reads from memory, and those it writes.

    `operator` is None for what converts or stores. `inner_bytes` is what its bodies
    hold besides. `is_elementwise`: it may write over what it reads. `carries` pairs
    what a loop reads with what it returns in its place. `is_send`: it moves a result to
    the host's memory.
    """

    operator: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inner_bytes: int = 0
    is_elementwise: bool = False
    carries: tuple[tuple[int, int], ...] = ()
    is_send: bool = False


@dataclass(frozen=True, eq=False)
class KernelBlock:
    """The kernels of one block in traced order, over `values`.

    `kept` are the values that the block returns. `replaced` pairs an input with the
    value that is returned in its memory.
    """

    values: tuple[Value, ...]
    kernels: tuple[Kernel, ...]
    kept: frozenset[int]
    replaced: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Border:
    """How a block shares memory with its owner, in positions of inputs and outputs.

    `replaced` pairs an input with the output that is returned in its memory. `sliced`
    inputs are cut out of something larger, `stored` outputs put into something larger.
    `fetched` inputs come from the host's memory, `sent` outputs go there.
    """

    replaced: tuple[tuple[int, int], ...] = ()
    sliced: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    fetched: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()


def kernel_block(
    graph: OpGraph,
    plan: ShardingPlan,
    operator_plans: Mapping[int, OperatorPlan],
    block: Block,
    border: Border,
    inner_bytes: Mapping[int, int],
) -> KernelBlock:
    """The kernels of a block.

    Args:
      graph: the graph.
      plan: specs of every tensor and output.
      operator_plans: specs of operands, by operator.
      block: one of the graph's blocks.
      border: what memory it shares with its owner.
      inner_bytes: by operator, what its bodies hold.
    """
    builder = _Builder(graph, plan, block)
    builder.add_inputs(border.sliced, border.fetched)
    for op in block.operators:
        specs = operator_plans[op.index].operand_specs
        builder.add_operator(op, specs, inner_bytes.get(op.index, 0))
    outputs = builder.add_outputs()
    builder.add_stores(outputs[position] for position in sorted(border.stored))
    builder.add_sends(outputs[position] for position in sorted(border.sent))
    pairs = [(builder.inputs[old], outputs[new]) for old, new in border.replaced]
    gone = border.stored | border.sent
    kept = (v for p, v in enumerate(outputs) if p not in gone)
    return builder.finish(
        frozenset(value for value in kept if value is not None),
        tuple((old, new) for old, new in pairs if new is not None and new != old),
    )


@dataclass(eq=False)
class _Node:
    """An operator or conversion before fusion.

    `absorbs`: it reads cheap operands by doing them itself.
    """

    operator: int | None
    reads: list[int]
    writes: list[int]
    is_cheap: bool = False
    is_expensive: bool = False
    absorbs: bool = False
    inner_bytes: int = 0
    carries: tuple[tuple[int, int], ...] = ()
    from_memory: tuple[int, ...] = ()
    is_send: bool = False

    @property
    def is_fusable(self) -> bool:
        return self.is_cheap or self.is_expensive


class _Builder:
    def __init__(self, graph: OpGraph, plan: ShardingPlan, block: Block) -> None:
        self.graph, self.plan, self.block = graph, plan, block
        self.values: list[Value] = []
        self.inputs: list[int] = []
        self._at: dict[tuple[int, Spec], int] = {}
        self._barrier: dict[int, int] = {}  # what has to be passed, by tensor
        self._nodes: list[_Node] = []
        self._maker: list[int | None] = []

    def _add_value(self, tensor: int, spec: Spec, *, is_outside: bool = False) -> int:
        whole = self.graph.tensors[tensor].type.bytes
        is_copy = spec != self.plan.tensors[tensor].spec
        size = whole // num_shards(spec, self.plan.mesh.axis_sizes)
        self.values.append(Value(tensor, spec, size, is_copy, is_outside))
        self._maker.append(None)
        self._at[tensor, spec] = len(self.values) - 1
        return len(self.values) - 1

    def _add_node(self, node: _Node) -> None:
        for value in node.writes:
            self._maker[value] = len(self._nodes)
        self._nodes.append(node)

    def add_inputs(self, sliced: frozenset[int], fetched: frozenset[int]) -> None:
        for position, tensor in enumerate(self.block.inputs):
            spec, is_cut = self.plan.tensors[tensor].spec, position in sliced
            is_outside = not (is_cut or position in fetched)
            self.inputs.append(self._add_value(tensor, spec, is_outside=is_outside))
            if not is_outside:
                self._add_node(_Node(None, [], [self.inputs[-1]], is_cheap=is_cut))

    def _read(self, tensor: int, spec: Spec) -> int:
        """The value of a tensor in a spec, converted if it is not there."""
        if (tensor, spec) in self._at:
            return self._at[tensor, spec]
        conversions = self.plan.tensors[tensor].conversions
        source_spec = next(c.source for c in conversions if c.target == spec)
        source = self._read(tensor, source_spec)
        value = self._add_value(tensor, spec)
        is_free = _is_cut_out(source_spec, spec)
        inner = self.values[source].bytes if turns(source_spec, spec) else 0
        self._add_node(
            _Node(None, [source], [value], is_free, absorbs=is_free, inner_bytes=inner)
        )
        return value

    def add_operator(self, op: Operator, specs: Sequence[Spec], inner: int) -> None:
        reads = [
            self._read(operand, spec)
            for operand, spec in zip(op.operands, specs, strict=True)
            if isinstance(operand, int)
        ]
        passed = (self._barrier.get(o) for o in op.operands if isinstance(o, int))
        waits = [value for value in dict.fromkeys(passed) if value is not None]
        if _is_renaming(op) and len(reads) == len(op.results):
            for value, result in zip(reads, op.results, strict=True):
                self._at[result, self.plan.tensors[result].spec] = value
            if op.kind == BARRIER:
                waits = [self.add_barrier(op, [*reads, *waits])]
            if waits:
                self._barrier.update(dict.fromkeys(op.results, waits[0]))
            return
        writes = [self._add_value(r, self.plan.tensors[r].spec) for r in op.results]
        carries = _carries(op, reads, writes)
        reads += waits
        cheap, expensive, reducing = _classes(op)
        absorbs = cheap or expensive or reducing
        self._add_node(
            _Node(op.index, reads, writes, cheap, expensive, absorbs, inner, carries)
        )

    def add_barrier(self, op: Operator, reads: list[int]) -> int:
        """A value of no bytes, which readers of a barrier's results wait for."""
        self.values.append(Value(-1, (), 0, is_copy=False, is_outside=True))
        self._maker.append(None)
        passed = len(self.values) - 1
        self._add_node(_Node(op.index, reads, [passed]))
        return passed

    def add_outputs(self) -> list[int | None]:
        """The value of each output; None for literals."""
        specs = self.plan.outputs[self.block.index]
        return [
            self._read(operand, spec) if isinstance(operand, int) else None
            for operand, spec in zip(self.block.outputs, specs, strict=True)
        ]

    def add_stores(self, values: Iterable[int | None]) -> None:
        for value in values:
            if value is not None:
                self._add_node(_Node(None, [value], [], absorbs=True))

    def add_sends(self, values: Iterable[int | None]) -> None:
        for value in values:
            if value is not None:
                self._add_node(_Node(None, [value], [], is_send=True))

    def finish(
        self, kept: frozenset[int], replaced: tuple[tuple[int, int], ...]
    ) -> KernelBlock:
        in_memory = self._in_memory(kept)
        kernels = []
        for node in self._nodes:
            node.from_memory = self._sources(node, in_memory)
            written = tuple(value for value in node.writes if in_memory[value])
            if written or not node.writes:
                kernels.append(
                    Kernel(
                        *(node.operator, node.from_memory, written),
                        *(node.inner_bytes, node.is_fusable, node.carries),
                        node.is_send,
                    )
                )
        return KernelBlock(tuple(self.values), tuple(kernels), kept, replaced)

    def _sources(self, node: _Node, in_memory: Sequence[bool]) -> tuple[int, ...]:
        """What a node reads from memory, through all that it does itself."""
        sources: dict[int, None] = {}
        for value in node.reads:
            maker = self._maker[value]
            if in_memory[value] or maker is None:
                sources[value] = None
            else:
                sources.update(dict.fromkeys(self._nodes[maker].from_memory))
        return tuple(sources)

    def _in_memory(self, kept: frozenset[int]) -> list[bool]:
        """Which values are written to memory, from the last node to the first."""
        in_memory = [maker is None for maker in self._maker]
        readers: list[list[_Node]] = [[] for _ in self.values]
        for node in reversed(self._nodes):
            if node.is_cheap and _is_inside_reduction(node, readers):
                node.absorbs = False
            is_used = not node.writes
            for value in node.writes:
                reading, is_kept = readers[value], value in kept
                is_used |= is_kept or bool(reading)
                in_memory[value] = is_kept or _needs_memory(node, reading)
            if is_used:
                for value in set(node.reads):
                    readers[value].append(node)
        return in_memory


def _needs_memory(node: _Node, readers: Sequence[_Node]) -> bool:
    if not readers:
        return False
    if not node.is_fusable or not all(reader.absorbs for reader in readers):
        return True
    only_fused = all(reader.is_fusable for reader in readers)
    return len(readers) > 1 and (node.is_expensive or not only_fused)


def _is_inside_reduction(node: _Node, readers: Sequence[Sequence[_Node]]) -> bool:
    """Whether a reduction does this operator itself, on what is in memory."""
    reading = [reader for value in node.writes for reader in readers[value]]
    return len(reading) == 1 and reading[0].absorbs and not reading[0].is_fusable


def _classes(op: Operator) -> tuple[bool, bool, bool]:
    """Whether an operator is cheap, expensive, or a reduction."""
    if op.kind in STRUCTURED:
        return False, False, False
    reducing = op.kind.startswith(_REDUCING)
    expensive = op.kind in TRANSCENDENTAL or op.kind.startswith(_RANDOM)
    fusable = op.kind in _MOVING or is_fusable(op.kind)
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


def _carries(
    op: Operator, reads: Sequence[int], writes: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """What a loop reads and returns in the same place."""
    if op.kind == SCAN:
        first, count = op.params["num_consts"], op.params["num_carry"]
    elif op.kind == WHILE:
        first = op.params["cond_nconsts"] + op.params["body_nconsts"]
        count = len(op.operands) - first
    else:
        return ()
    read = iter(reads)
    by_operand = [
        None if op.is_constant(i) else next(read) for i in range(first + count)
    ]
    pairs = zip(by_operand[first:], writes, strict=False)
    return tuple((old, new) for old, new in pairs if old is not None)


def _is_cut_out(source: Spec, target: Spec) -> bool:
    """Whether a device cuts its part of `target` out of its own of `source`."""
    return all(s in (t, REPLICATED) for s, t in zip(source, target, strict=True))


def turns(source: Spec, target: Spec) -> bool:
    """Whether a collective cuts along a dim that is not the major one.

    Its operand is then copied, that dim first.
    """
    return any(
        t > 0 and s not in (t, REPLICATED) for s, t in zip(source, target, strict=True)
    )
