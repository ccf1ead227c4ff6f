"""How a batch flows through a graph that is cut into microbatches.

Every tensor gets a state along the sequential axis, every operator a factor that keeps
it, by the same rules that split operators over devices; what needs the whole is done
behind the loop, and what it holds up there is remembered as a coupling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..frontend.batched_conditions import factor_of_microbatch
from ..graph.build_graph import SHARD_MAP, STRUCTURED
from ..graph.dependencies import tensors_of, updates_of
from ..graph.op_graph import Operand, Operator, OpGraph
from ..graph.work import holds_heavy_work
from ..rules.base import Factor, cuts_evenly, factors_of, replicate
from ..sharding.ports import Port, Site, ports_of
from ..sharding.spec import MAX, MIN, REPLICATED, State
from .extremes import microbatch_factors
from .joined_batches import WHOLE, Part, Way, joint_of, parts_of


@dataclass(frozen=True)
class Phases:
    """Operators of the outermost block: before, in and behind the loop."""

    before: tuple[Operator, ...]
    loop: tuple[Operator, ...]
    behind: tuple[Operator, ...]

    @classmethod
    def of(
        cls,
        operators: Sequence[Operator],
        is_loop: Callable[[Operator], bool],
        may_follow: Callable[[Operator], bool],
    ) -> Phases:
        """What the loop needs comes before it, what it does not need behind.

        Of what differs from microbatch to microbatch (`is_loop`), that is what the
        loop does not need and that `may_follow` it.
        """
        before: list[Operator] = []
        loop: list[Operator] = []
        behind: list[Operator] = []
        needed: set[int] = set()
        for op in reversed(operators):
            is_needed = not needed.isdisjoint(op.results)
            if is_loop(op) and (is_needed or not may_follow(op)):
                loop.append(op)
            elif is_needed:
                before.append(op)
            else:
                behind.append(op)
                continue
            needed.update(tensors_of(op.operands))
        return cls(*(tuple(reversed(each)) for each in (before, loop, behind)))


@dataclass
class Flow:
    """States along the microbatch axis, found in one walk from the batch on.

    `part` is by tensor, `factor` by operator, `read` what an operator takes of each
    operand and a loop or branch of what its blocks return. What is `once` runs on
    whole values, before the loop if it is `hoisted`.
    """

    graph: OpGraph
    batch_size: int
    hoisted: Collection[int] = ()
    part: dict[int, Part] = field(default_factory=dict)
    factor: dict[int, Factor] = field(default_factory=dict)
    read: dict[Site, Part] = field(default_factory=dict)
    once: set[int] = field(default_factory=set)  # operators
    behind: set[int] = field(default_factory=set)  # tensors known after the loop
    couplings: dict[int, tuple[Operator, int]] = field(default_factory=dict)
    ways: dict[tuple[object, ...], Way | None] = field(default_factory=dict)

    def run(self, batch: Sequence[int]) -> None:
        outermost = self.graph.blocks[0]
        for tensor in outermost.inputs:
            self.part[tensor] = WHOLE
        for tensor in batch:
            size = self.graph.tensors[tensor].type.shape[0]
            self.write(tensor, (0, size or self.batch_size))
        for op in outermost.operators:
            if op.index in self.hoisted:
                self.once.add(op.index)
                self.set_whole(op)
                continue
            reads = tensors_of(op.operands)
            late = [t for t in reads if t in self.behind]
            if late or not self.run_split(op):
                sums = [t for t in reads if self.state_of(t) < REPLICATED]
                is_cut = any(self.state_of(t) >= 0 for t in reads)
                if is_cut and op.results:  # it needs all examples, or a source does
                    self.couplings[op.index] = op, [*late, *sums, *op.results][0]
                self.once.add(op.index)
                self.set_whole(op)
                self.behind.update(op.results)
        self.cut_broadcasts()

    def state_of(self, operand: Operand) -> State:
        return self.part_of(operand)[0]

    def part_of(self, operand: Operand) -> Part:
        return self.part[operand] if isinstance(operand, int) else WHOLE

    def write(self, tensor: int, part: Part) -> None:
        self.part[tensor] = part

    def set_whole(self, op: Operator) -> None:
        """The operator sees everything whole, as do its bodies."""
        self.factor[op.index] = replicate(op)
        self.set_read(op, [WHOLE] * len(op.operands))
        self.part.update(dict.fromkeys(op.results, WHOLE))
        for body in op.bodies:
            block = self.graph.blocks[body]
            self.part.update(dict.fromkeys(block.inputs, WHOLE))
            for position in range(len(block.outputs)):
                self.read["output", body, position] = WHOLE
            for inner in block.operators:
                self.set_whole(inner)

    def set_read(self, op: Operator, parts: Sequence[Part]) -> None:
        for position, part in enumerate(parts):
            self.read["operand", op.index, position] = part

    def run_split(self, op: Operator) -> bool:
        """Find what an operator does to one microbatch; False if it needs all."""
        if op.kind in STRUCTURED:
            return self.run_structured(op)
        parts = [self.part_of(operand) for operand in op.operands]
        factor = factor_of_microbatch(op, [state for state, _ in parts])
        way = self.match(op, parts) if factor is None else (factor, parts, [WHOLE])
        if way is None:
            return False
        self.factor[op.index], taken, made = way
        self.set_read(op, taken)
        for result, part in zip(op.results, made, strict=True):
            self.write(result, part)
        return True

    def match(self, op: Operator, parts: Sequence[Part]) -> Way | None:
        """How the operator takes operands as they are; whole ones can be cut for it."""
        key = self.alike[op.index], *parts
        if key not in self.ways:
            self.ways[key] = self._match(op, parts)
        return self.ways[key]

    @cached_property
    def alike(self) -> dict[int, int]:
        """Equal numbers for operators that differ in names and tensors only."""
        columns = self.graph.columns
        return dict(zip(columns.index.tolist(), columns.alike.tolist(), strict=True))

    def _match(self, op: Operator, parts: Sequence[Part]) -> Way | None:
        states = [state for state, _ in parts]
        numbers = {number for state, number in parts if state >= 0}
        if len(numbers) > 1:
            return joint_of(op, parts, self.batch_size)
        number = min(numbers, default=self.batch_size)
        if all(state == REPLICATED for state in states):
            found = [replicate(op)]
        else:
            found = [
                factor
                for factor in microbatch_factors(op)
                if not factor.is_positional
                and cuts_evenly(op, factor, number)
                and keeps(states, factor.operands)
            ]
        if not found:
            return joint_of(op, parts, self.batch_size)
        best = min(found, key=lambda f: num_cut(states, f.operands))
        return best, parts_of(best.operands, number), parts_of(best.results, number)

    def cut_broadcasts(self) -> None:
        """Makes a broadcast value cut from the start if all its readers want it so."""
        makers = {
            op.results[0]: op
            for op in self.graph.operators()
            if op.kind == "broadcast_in_dim" and op.index not in self.once
        }
        asked: dict[int, set[Part]] = {tensor: set() for tensor in makers}
        for site, operand in _readings(self.graph):
            if isinstance(operand, int) and operand in asked:
                asked[operand].add(self.read.get(site, WHOLE))
        for tensor, parts in asked.items():
            if len(parts) != 1 or self.part[tensor] != WHOLE:
                continue
            ((state, number),), op = parts, makers[tensor]
            for factor in factors_of(op):
                if factor.results == (state,) and {*factor.operands} == {REPLICATED}:
                    if state >= 0 and cuts_evenly(op, factor, number):
                        self.factor[op.index] = factor
                        self.write(tensor, (state, number))

    def run_structured(self, op: Operator) -> bool:
        """Iterate the ports of a loop or branch until their states are stable."""
        reads = tensors_of(op.operands)
        if op.kind == SHARD_MAP and any(self.part[t] != WHOLE for t in reads):
            return False  # its body is written for the shapes of the whole
        ports = ports_of(self.graph, op)
        found = [WHOLE] * len(ports)
        while True:
            for port, part in zip(ports, found, strict=True):
                for tensor, extra in port.writes:
                    self.write(tensor, _shifted(part, extra))
            for body in op.bodies:
                for inner in self.graph.blocks[body].operators:
                    if not self.run_split(inner):
                        return False
            before = tuple(found)
            for number, port in enumerate(ports):
                joined = self.join(port, found[number])
                if joined is None:
                    return False
                # A literal is its own maximum, but a predicate is nothing of parts.
                is_extreme = joined[0] in (MAX, MIN) and bool(port.writes)
                if port.is_whole and joined != WHOLE and not is_extreme:
                    return False
                found[number] = joined
            if tuple(found) == before:
                break
        self.set_read(op, [WHOLE] * len(op.operands))
        for port, part in zip(ports, found, strict=True):
            self.read.update((site, _shifted(part, n)) for _, n, site in port.reads)
        return True

    def join(self, port: Port, part: Part) -> Part | None:
        """The one part of all that a port reads; None if two of them differ."""
        for operand, extra, _ in port.reads:
            state, number = self.part[operand]
            if state == REPLICATED:
                continue
            if 0 <= state < extra:
                return None
            found = (state - extra if state >= 0 else state), number
            if part not in (WHOLE, found):
                return None
            part = found
        return part

    def first_coupling(self) -> tuple[Operator, int] | None:
        """The first example-wise operator stuck behind the loop with heavy work after.

        What leads to no heavy work (metrics) may be computed behind the loop.
        """
        culprit: dict[int, tuple[Operator, int]] = {}
        for op in self.graph.blocks[0].operators:
            stuck = [culprit[t] for t in tensors_of(op.operands) if t in culprit]
            source = stuck[0] if stuck else self.couplings.get(op.index)
            if source is None:
                continue
            if holds_heavy_work(self.graph, op):
                return source
            culprit.update(dict.fromkeys(op.results, source))
        return None

    def phases(self, sums_stay_apart: bool) -> Phases:
        """What runs before, in and behind the loop."""
        operators = self.graph.blocks[0].operators
        updates = updates_of(operators) if sums_stay_apart else frozenset[int]()
        in_loop = self.loop_operators()

        def may_follow(op: Operator) -> bool:
            """Whether a linear operator on sums makes no more to carry."""
            reads = [(self.state_of(t), t) for t in tensors_of(op.operands)]
            if any(state > REPLICATED for state, _ in reads):
                return False
            if sums_stay_apart and op.kind in ("add", "add_any"):
                return True
            if op.index in updates:
                return True
            if op.bodies or op.kind == "convert_element_type":
                return False  # a sum is kept in the wider dtype
            types = (self.graph.tensors[t].type for s, t in reads if s < REPLICATED)
            carried = sum(kind.bytes for kind in types)
            return carried <= sum(kind.bytes for kind in op.result_types)

        return Phases.of(operators, lambda op: op.index in in_loop, may_follow)

    def loop_operators(self) -> set[int]:
        """Those that do another thing each time, and what reads their results.

        A barrier (remat) hands parameters on, the same each time, beside examples.
        """
        found: set[int] = set()
        made: set[int] = set()
        for op in self.graph.blocks[0].operators:
            if op.index in self.once:
                continue
            reads = tensors_of(op.operands)
            is_cut = any(self.part[t] != WHOLE for t in (*reads, *op.results))
            if is_cut or not made.isdisjoint(reads):
                found.add(op.index)
                made.update(op.results)
        return found


def _readings(graph: OpGraph) -> Iterator[tuple[Site, Operand]]:
    """All that operators read and blocks return, by where."""
    for block in graph.blocks:
        for position, operand in enumerate(block.outputs):
            yield ("output", block.index, position), operand
        for op in block.operators:
            for position, operand in enumerate(op.operands):
                yield ("operand", op.index, position), operand


def _shifted(part: Part, extra: int) -> Part:
    """The part of a tensor with `extra` more leading dims."""
    state, number = part
    return (state + extra, number) if state >= 0 else part


def keeps(states: Sequence[State], wanted: Sequence[State]) -> bool:
    """Whether what is cut or pending is wanted so; what is whole can be cut."""
    pairs = zip(states, wanted, strict=True)
    return all(has in (REPLICATED, state) for has, state in pairs)


def num_cut(states: Sequence[State], wanted: Sequence[State]) -> int:
    """How many whole values must be cut."""
    pairs = zip(states, wanted, strict=True)
    return sum(has == REPLICATED != state for has, state in pairs)
