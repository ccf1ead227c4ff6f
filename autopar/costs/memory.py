"""Bytes one device holds while a plan runs: arguments, results and temporaries.

One sweep over what is live, from the plan alone. Operators are of three kinds:

  views    other names of what they read: reshapes, barriers, pins
  fused    elementwise and moving ones: made inside each kernel that reads them, unless
           a product, collective, loop or result needs them in memory, or several
           kernels would each read more for it than it has bytes (or, on CPUs, would
           each do a transcendental function)
  kernels  products, reductions, collectives, loops: what they make is in memory

Kernels run in post-order from the results, so that each frees the most that can be
freed then, or on TPUs as the step is written, whichever holds least, as in XLA. A
kernel may write over an operand of its size that nobody reads later; the next value of
donated state, or of a loop's carry, takes the memory of the old one. Of a loop the body
counts once, and what it stacks in full.

What a compiler makes of it is told by `MEMORY_FACTORS`, for each kind of device: the
typical ratio of compiled to swept temporaries of the zoo (`benchmarks.memory_error`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import NamedTuple

import numpy as np

from ..clusters.ici import SLICES
from ..graph.build_graph import BARRIER, SCAN, SHARD_MAP, WHILE
from ..graph.op_graph import Block, Operator, OpGraph
from ..plans.plan import ShardingPlan
from ..rules.halos import copied_bytes, factors_with_halos, rows_with_halos
from ..sharding.spec import Spec, is_cut_out, num_shards
from .compute import TRANSCENDENTAL
from .kernels import (
    EXPANDED,
    FUSED,
    KERNEL,
    VIEW,
    expanded_bytes,
    fresh_of,
    kinds_of,
)

MEMORY_FACTORS = {"CPU": 1.05, "GPU": 1.1, "TPU": 1.1}
WORKSPACE_BYTES = 2**25  # of products on GPUs: what cuBLAS documents from Hopper on
OLDER_WORKSPACE_BYTES = 2**22  # and before
VMEM_BYTES = 2**27  # of a TPU beside its memory, where its compiler keeps what it can
POINTER_BYTES = 8  # of each result, in the table that a program returns
AS_MUCH = 1.5  # times its own bytes that several kernels may each read for a value
MOST_SOURCES = 64  # that one kernel reads through what it does itself


@dataclass(frozen=True)
class Value:
    """A tensor in one spec, in memory from one position to another (both included).

    `is_copy`: it was made in another spec. `bytes` are those of one device.
    """

    tensor: int
    spec: Spec
    bytes: int
    start: int
    end: int
    is_copy: bool


@dataclass(frozen=True, eq=False)
class BlockMemory:
    """What one block holds, kernel by kernel, its operands apart.

    `bytes` [positions] include what bodies hold. `operators` [positions] are indices of
    operators, -1 for what converts. The rest is read from `sweep` and its chosen `run`.
    """

    bytes: np.ndarray
    operators: tuple[int, ...]
    sweep: _BlockSweep
    run: _Run

    @cached_property
    def values(self) -> list[Value]:
        """What is made in memory."""
        return self.sweep.values(self.run)

    @cached_property
    def runs(self) -> Mapping[int, tuple[int, int]]:
        """The first and last position of each operator, or of kernels that do it."""
        return self.sweep.spans(self.run.position)

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once."""
        return int(self.bytes.max(initial=0))

    @property
    def fullest(self) -> int:
        """The position of the most bytes; 0 where nothing runs."""
        return int(self.bytes.argmax()) if len(self.bytes) else 0

    def live(self, position: int) -> Iterator[Value]:
        """The values in memory while a kernel runs."""
        return (each for each in self.values if each.start <= position <= each.end)


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What a plan is predicted to hold on one device.

    `argument_bytes` and `output_bytes` (of results that take no argument's memory) are
    held throughout; `blocks` say what comes and goes, `factor` times which a compiler
    for these devices needs, in its memory but for `on_chip_bytes`, and
    `workspace_bytes` of its kernels besides.
    """

    graph: OpGraph
    plan: ShardingPlan
    argument_bytes: int
    output_bytes: int
    blocks: Mapping[int, BlockMemory]
    factor: float
    on_chip_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def temp_bytes(self) -> int:
        """The memory that temporaries need."""
        return round(self._needed(self.blocks[0].peak_bytes))

    def _needed(self, swept: float) -> float:
        return max(self.factor * swept - self.on_chip_bytes, 0.0) + self.workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """All of it, as `MemoryUse.device_bytes` of the compiled program."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes

    def at_peak(self) -> list[Value]:
        """What takes memory at the fullest point, besides arguments and results."""
        path = self.path_to(self.blocks[0].fullest)
        return [each for block, at in path for each in self.blocks[block].live(at)]

    def path_to(self, position: int) -> Iterator[tuple[int, int]]:
        """(block, position) of a point of the outermost block, and of the fullest ones
        in bodies that run there.
        """
        block = 0
        while self.blocks[block].operators:
            yield block, position
            bodies = self.bodies(self.blocks[block].operators[position])
            if not bodies:
                return
            block = max(bodies, key=lambda body: self.blocks[body].peak_bytes)
            position = self.blocks[block].fullest

    def bytes_at(self, position: int) -> float:
        """All that a device holds at a point of the outermost block."""
        used = self.blocks[0].bytes
        held = self._needed(float(used[position])) if len(used) else 0.0
        return self.argument_bytes + self.output_bytes + held

    def bodies(self, index: int) -> tuple[int, ...]:
        """The blocks that an operator runs, by its index."""
        return self._bodies.get(index, ())

    @cached_property
    def _bodies(self) -> dict[int, tuple[int, ...]]:
        operators = self.graph.operators()
        found = {op.index: op.bodies for op in operators if op.kind != SHARD_MAP}
        return {index: bodies for index, bodies in found.items() if bodies}

    def __str__(self) -> str:
        return (
            f"{self.peak_bytes:,} B a device = {self.argument_bytes:,} arguments "
            f"+ {self.output_bytes:,} results + {self.temp_bytes:,} temporaries"
        )


def peak_bytes(graph: OpGraph, plan: ShardingPlan) -> int:
    """The most bytes that one device is predicted to hold; see `MemoryProfile`."""
    return memory_profile(graph, plan).peak_bytes


def memory_profile(graph: OpGraph, plan: ShardingPlan) -> MemoryProfile:
    """The memory of a plan on one device."""
    sweep = _Sweep(graph, plan)
    tied = {p: i.output for p, i in enumerate(graph.inputs) if i.output is not None}
    at_host = {p for p, each in enumerate(graph.inputs) if each.memory == "host"}
    border = _Border(
        {output: p for p, output in tied.items() if p not in at_host},
        frozenset(at_host),
        frozenset(tied[p] for p in at_host if p in tied),
        frozenset(range(len(graph.outputs))) - frozenset(tied.values()),
    )
    sweep.block(graph.blocks[0], border)
    returned = set(tied.values())
    output_bytes = POINTER_BYTES * len(graph.outputs)
    for position, operand in enumerate(graph.outputs):
        if isinstance(operand, int) and position not in returned:
            output_bytes += sweep.bytes(operand, plan.outputs[0][position])
    family = family_of(plan.device_kind)
    given = sum(each.bytes for each in plan.inputs if each.memory == "device")
    on_chip = VMEM_BYTES * (family == "TPU")
    needed = MEMORY_FACTORS[family], on_chip, workspace_bytes(graph, plan.device_kind)
    return MemoryProfile(graph, plan, given, output_bytes, sweep.blocks, *needed)


def workspace_bytes(graph: OpGraph, device_kind: str) -> int:
    """What products on GPUs take besides what they read and make."""
    has_products = any(op.kind == "dot_general" for op in graph.operators())
    if family_of(device_kind) != "GPU" or not has_products:
        return 0
    is_older = device_kind.startswith(("V100", "A100"))
    return OLDER_WORKSPACE_BYTES if is_older else WORKSPACE_BYTES


def family_of(device_kind: str) -> str:
    """`CPU`, `TPU` or `GPU`, which other devices are taken for."""
    if device_kind in ("CPU", ""):
        return "CPU"
    return "TPU" if device_kind in SLICES else "GPU"


@dataclass(frozen=True)
class _Border:
    """How a block's inputs and outputs lie, by position.

    `over`: outputs that take the memory of an input. `made`: inputs that take memory
    when they are first read (slices, what is fetched). `sent`: outputs that are written
    elsewhere at once (stacks, what goes to the host). `apart`: outputs whose memory is
    counted outside of the block.
    """

    over: Mapping[int, int] = field(default_factory=dict)
    made: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()


class _Sweep:
    """Goes through blocks, inner ones first."""

    def __init__(self, graph: OpGraph, plan: ShardingPlan) -> None:
        self.graph, self.plan, self.kinds = graph, plan, kinds_of(graph.columns)
        self.copies = [tensor.conversions for tensor in plan.tensors]
        self.made, columns = [t.spec for t in plan.tensors], graph.columns
        specs = [op.operand_specs for op in plan.operators]
        self.read = dict(zip(columns.index.tolist(), specs, strict=True))
        self.blocks: dict[int, BlockMemory] = {}
        self._sizes, self._shards = plan.mesh.axis_sizes, dict[int, int]()
        self.inner = Counter[int]()  # bytes that operators hold besides, by index
        for row in rows_with_halos(graph, [op.factors for op in plan.operators]):
            op = columns.operators[row]
            halos = factors_with_halos(op, plan.operators[row].factors)
            self.inner[op.index] += copied_bytes(op, halos, self._sizes)

        self.family = family_of(plan.device_kind)
        for op in (each for each in graph.operators() if each.kind in EXPANDED):
            pairs = zip(op.operands, self.read[op.index], strict=True)
            sizes = [self.bytes(t, spec) for t, spec in pairs if isinstance(t, int)]
            self.inner[op.index] += expanded_bytes(op, sizes, self.family)

    def bytes(self, tensor: int, spec: Spec) -> int:
        """What one device holds of a tensor, in a spec that the plan has."""
        shards = self._shards.get(id(spec))  # a spec has no hash that is kept
        if shards is None:
            shards = self._shards[id(spec)] = num_shards(spec, self._sizes)
        return self.graph.tensors[tensor].type.bytes // shards

    def block(self, block: Block, border: _Border) -> int:
        """The peak of a block, its operands apart."""
        for op in block.operators:
            if op.bodies and op.kind != SHARD_MAP:
                self.inner[op.index] += self._loop_bytes(op)
        found = _BlockSweep(self, block, border).swept()
        self.blocks[block.index] = found
        return found.peak_bytes

    def _loop_bytes(self, op: Operator) -> int:
        blocks = [self.graph.blocks[body] for body in op.bodies]
        borders = [_Border(apart=frozenset(range(len(b.outputs)))) for b in blocks]
        if op.kind == SCAN:
            consts, carry = op.params["num_consts"], op.params["num_carry"]
            slices = frozenset(range(consts + carry, len(blocks[0].inputs)))
            stacks = frozenset(range(carry, len(blocks[0].outputs)))
            borders = [_Border({k: consts + k for k in range(carry)}, slices, stacks)]
        elif op.kind == WHILE:
            consts, carry = op.params["body_nconsts"], len(blocks[1].outputs)
            borders = [_Border(), _Border({k: consts + k for k in range(carry)})]
        return max(map(self.block, blocks, borders))


@dataclass(eq=False, slots=True)
class _Node:
    """A kernel, or what is done inside of others: an operator, a copy, a slice.

    `fresh`: what it writes that cannot lie over what it reads.
    """

    kind: int
    reads: list[int]
    writes: list[int]
    operator: int = -1
    fresh: Sequence[int] = ()
    sources: frozenset[int] = frozenset()  # values in memory that it reads
    waits: frozenset[int] = frozenset()  # values that are there before it runs
    is_done_once: bool = False  # for all that read it, not by each of them


_Span = tuple[int, int]


class _Run(NamedTuple):
    """Positions of kernels in an order, those of values, and bytes by position."""

    position: Mapping[int, int]
    starts: Sequence[int]
    ends: Sequence[int]
    bytes: np.ndarray


class _BlockSweep:
    """Values are numbered as they are made; inputs come first."""

    def __init__(self, sweep: _Sweep, block: Block, border: _Border) -> None:
        self.sweep, self.block, self.border = sweep, block, border
        self.family = sweep.family
        self.tensor: list[int] = []
        self.spec: list[Spec] = []
        self.is_copy: list[bool] = []
        self.maker: list[int] = []  # a node, or -1 for what lies elsewhere
        self.nodes: list[_Node] = []
        self.number: dict[object, int] = {}  # by tensor as made, or (tensor, spec)
        self.views: list[tuple[int, list[int]]] = []
        self._add_nodes()
        self.bytes = [*map(sweep.bytes, self.tensor, self.spec)]
        self._put_in_memory()

    def _new(self, tensor: int, spec: Spec, maker: int, is_copy: bool = False) -> int:
        number = len(self.tensor)
        self.number[(tensor, spec) if is_copy else tensor] = number
        self.tensor.append(tensor)
        self.spec.append(spec)
        self.is_copy.append(is_copy)
        self.maker.append(maker)
        return number

    def _read(self, tensor: int, spec: Spec) -> int:
        """The value of a tensor in a spec; what converts to it comes before."""
        made = self.sweep.made[tensor]
        is_copy = spec != made
        found = self.number.get((tensor, spec) if is_copy else tensor)
        if found is not None:
            return found
        if not is_copy:  # a constant of the body, say
            return self._new(tensor, spec, -1)
        copies = self.sweep.copies[tensor]
        source = next((each.source for each in copies if each.target == spec), made)
        before = self._read(tensor, source)
        value = self._new(tensor, spec, len(self.nodes), is_copy=True)
        kind = FUSED if is_cut_out(source, spec) else KERNEL
        fresh = [value] if kind == KERNEL else ()
        self.nodes.append(_Node(kind, [before], [value], fresh=fresh))
        return value

    def _add_nodes(self) -> None:
        block, sweep, border = self.block, self.sweep, self.border
        made = sweep.made
        for position, tensor in enumerate(block.inputs):
            maker = len(self.nodes) if position in border.made else -1
            value = self._new(tensor, made[tensor], maker)
            if maker >= 0:
                self.nodes.append(_Node(FUSED, [], [value]))
        for op in block.operators:
            specs, own = sweep.read[op.index], sweep.kinds[op.index]
            kind = own
            if self.family == "CPU" and op.kind.startswith(("dot", "scatter")):
                kind = KERNEL  # a loop over updates, and what its products read
            reads = [
                self._read(tensor, spec) if isinstance(tensor, int) else -1
                for tensor, spec in zip(op.operands, specs, strict=True)
            ]
            if op.kind == BARRIER:
                self._add_barrier(op, reads)
                continue
            if kind == VIEW:
                for value, result in zip(reads, op.results, strict=True):
                    if value < 0:
                        value = self._new(result, made[result], len(self.nodes))
                        self.nodes.append(_Node(FUSED, [], [value]))
                    self.number[result] = value
                self.views.append((op.index, [v for v in reads if v >= 0]))
                continue
            reads = [value for value in reads if value >= 0]
            node = len(self.nodes)
            writes = [self._new(each, made[each], node) for each in op.results]
            new = _Node(kind, reads, writes, op.index, fresh_of(op, own, writes))
            new.is_done_once = self.family == "CPU" and op.kind in TRANSCENDENTAL
            self.nodes.append(new)
        specs = sweep.plan.outputs[block.index]
        self.outputs = [
            self._read(each, spec) if isinstance(each, int) else -1
            for each, spec in zip(block.outputs, specs, strict=True)
        ]

    def _add_barrier(self, op: Operator, reads: Sequence[int]) -> None:
        """Other names of what is in memory, once all of it is there.

        XLA does not wait for that where collectives of GPUs may overlap with work.
        """
        is_kept = self.family == "CPU" or self.sweep.plan.mesh.size == 1
        waits = frozenset(value for value in reads if value >= 0 and is_kept)
        for value, result in zip(reads, op.results, strict=True):
            name = self._new(result, self.sweep.made[result], len(self.nodes))
            own = [value] if value >= 0 else []
            self.nodes.append(_Node(VIEW, own, [name], op.index, waits=waits))

    def _put_in_memory(self) -> None:
        """Decides which values are in memory, and what each node reads there."""
        kept = {v for k, v in enumerate(self.outputs) if k not in self.border.sent}
        num_readers, is_needed = Counter(self.outputs), set(kept)
        for node in self.nodes:
            for value in set(node.reads):
                num_readers[value] += 1
            if node.kind in (KERNEL, VIEW):
                is_needed.update(node.reads)
        size, self.in_memory = self.bytes, [True] * len(self.tensor)
        sources = [frozenset((value,)) for value in range(len(self.tensor))]
        hidden: dict[int, frozenset[int]] = {}  # what waits inside of its readers
        self.kernels: list[int] = []
        for number, node in enumerate(self.nodes):
            read = [sources[each] for each in node.reads]
            node.sources = read[0] if len(read) == 1 else frozenset().union(*read)
            if hidden:
                node.waits |= {v for e in node.reads for v in hidden.get(e, ())}
            inside = node.writes if node.kind == VIEW and node.reads else []
            if node.kind == FUSED and len(node.sources) <= MOST_SOURCES:
                amount = sum([size[each] for each in node.sources])
                inside = [
                    value
                    for value in node.writes
                    if value not in is_needed
                    and (
                        num_readers[value] < 2
                        or (amount <= AS_MUCH * size[value] and not node.is_done_once)
                    )
                ]
            for value in inside:
                self.in_memory[value], sources[value] = False, node.sources
            if not node.writes or len(inside) < len(node.writes):
                self.kernels.append(number)
            elif node.waits:
                hidden.update(dict.fromkeys(node.writes, node.waits))
        self.sources = sources

    def swept(self) -> BlockMemory:
        """What is live in the order that holds less."""
        self.before = {k: self._before(self.nodes[k]) for k in self.kernels}
        orders = [self._post_order(), self._freeing_order()]
        if self.family == "TPU":
            orders.append(self._written_order())
        runs = [self._run(order) for order in orders]
        run = min(runs, key=lambda run: run.bytes.max(initial=0))
        operators = tuple([self.nodes[node].operator for node in run.position])
        return BlockMemory(run.bytes, operators, self, run)

    def _post_order(self) -> list[int]:
        found = dict[int, None]()
        ends = [self.maker[v] for v in self.outputs if v >= 0 and self.in_memory[v]]
        for end in (*ends, *self.kernels):
            path = [(end, iter(self.before[end]))] if end >= 0 else []
            while path:
                node, before = path[-1]
                following = next((k for k in before if k not in found), None)
                if following is None:
                    found[node] = None
                    path.pop()
                else:
                    path.append((following, iter(self.before[following])))
        return list(found)

    def _written_order(self) -> list[int]:
        """As the step is written, with what converts to less behind what it reads."""
        place: dict[int, int] = {}
        for number in self.kernels:
            node, before = self.nodes[number], self.before[number]
            less = sum(self.bytes[v] for v in node.sources)
            less -= sum(self.bytes[v] for v in node.writes)
            is_early = node.operator < 0 < less and before
            place[number] = max(place[k] for k in before) if is_early else number
        return sorted(self.kernels, key=place.__getitem__)

    def _freeing_order(self) -> list[int]:
        """Of the kernels that can run, always the one that frees the most next."""
        readers: dict[int, list[int]] = {}
        for number in self.kernels:
            for value in self.nodes[number].sources:
                readers.setdefault(value, []).append(number)
        left = {value: len(found) for value, found in readers.items()}
        left.update({v: left.get(v, 0) + 1 for v in self.outputs})
        waits = {number: len(found) for number, found in self.before.items()}
        after: dict[int, list[int]] = {}
        for number, makers in self.before.items():
            for maker in makers:
                after.setdefault(maker, []).append(number)
        over = {self.outputs[k] for k in self.border.over}

        size, maker, in_memory = self.bytes, self.maker, self.in_memory
        made = dict.fromkeys(self.kernels, 0)  # bytes that a kernel adds
        for value, number in enumerate(maker):
            if in_memory[value] and number in made and value not in over:
                made[number] += size[value]

        def freed(number: int) -> tuple[int, int]:
            sources = self.nodes[number].sources
            last = [size[v] for v in sources if left[v] == 1 and maker[v] >= 0]
            return made[number] - sum(last), number

        ready = [freed(number) for number in self.kernels if not waits[number]]
        heapify(ready)
        found = dict[int, None]()
        while ready:
            entry = heappop(ready)
            number = entry[1]
            if number in found:
                continue
            if entry != (now := freed(number)):
                heappush(ready, now)
                continue
            found[number] = None
            for value in self.nodes[number].sources:
                left[value] -= 1
            for other in after.get(number, ()):
                waits[other] -= 1
                if not waits[other]:
                    heappush(ready, freed(other))
            for value in self.nodes[number].sources:
                if left[value] == 1 and self.maker[value] >= 0:
                    for other in readers[value]:
                        if other not in found and not waits[other]:
                            heappush(ready, freed(other))
        return list(found)

    def _before(self, node: _Node) -> list[int]:
        """The kernels that a kernel reads from, or waits for."""
        waits = [v for v in sorted(node.waits) if self.in_memory[v]]
        makers = [self.maker[value] for value in (*waits, *sorted(node.sources))]
        return [k for k in dict.fromkeys(makers) if k >= 0]

    def _run(self, order: Sequence[int]) -> _Run:
        """What is live where kernels run in an order."""
        position = {node: place for place, node in enumerate(order)}
        end, count = len(order) - 1, len(self.tensor)
        last = [-1] * count
        for node, place in position.items():
            for value in self.nodes[node].sources:
                last[value] = place
        # Inputs are the first values.
        over = {self.outputs[k]: p for k, p in self.border.over.items()}
        kept = {v for k, v in enumerate(self.outputs) if k not in self.border.sent}
        apart = {self.outputs[k] for k in self.border.apart}
        for k in self.border.sent:
            for value in self.sources[self.outputs[k]] if self.outputs[k] >= 0 else ():
                made = position.get(self.maker[self.outputs[k]], end)
                last[value] = max(last[value], made)
        starts, ends = [-1] * count, [-1] * count
        for node, place in position.items():
            each = self.nodes[node]
            ending = [v for v in each.sources if last[v] == place > starts[v] >= 0]
            ending = [value for value in sorted(ending) if value not in kept]
            for value in each.writes:
                old = over.get(value)
                is_fresh = value in each.fresh
                is_over = old is not None and last[old] <= place - is_fresh
                if not self.in_memory[value] or value in apart or is_over:
                    continue
                starts[value] = place
                ends[value] = end if value in kept else max(last[value], place)
                sizes = [self.bytes[other] for other in ending]
                if not is_fresh and self.bytes[value] in sizes:
                    ends[ending.pop(sizes.index(self.bytes[value]))] = place - 1
        changes = np.zeros(len(order) + 1, np.int64)
        for number, start in enumerate(starts):
            if start >= 0:
                changes[start] += self.bytes[number]
                changes[ends[number] + 1] -= self.bytes[number]
        inner = [self.sweep.inner[self.nodes[node].operator] for node in order]
        return _Run(position, starts, ends, np.cumsum(changes)[:-1] + inner)

    def values(self, run: _Run) -> list[Value]:
        """All that is made in memory."""
        every = self.tensor, self.spec, self.bytes, run.starts, run.ends, self.is_copy
        is_held = [start >= 0 for start in run.starts]
        return [Value(*each) for each in compress(zip(*every, strict=True), is_held)]

    def spans(self, position: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """When each operator runs, itself or inside of others."""
        end, count = len(position) - 1, len(self.tensor)
        runs: dict[int, tuple[int, int]] = {}
        span: list[tuple[int, int] | None] = [None] * count  # when a value is read
        for value in self.outputs:
            if value >= 0:
                span[value] = end, end
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            place = position.get(number)
            made = [span[each] for each in node.writes]
            own = reduce(_joined, made, None) if place is None else (place, place)
            if own is None:
                continue
            if node.operator >= 0:
                runs[node.operator] = _joined(runs.get(node.operator), own) or own
            for value in node.reads:
                span[value] = _joined(span[value], own)
        for index, reads in self.views:
            found = reduce(_joined, [span[each] for each in reads], None)
            if found is not None:
                runs[index] = found
        return runs


def _joined(one: _Span | None, other: _Span | None) -> _Span | None:
    """The shortest span that has both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
