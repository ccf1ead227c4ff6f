"""Rows of memory of a sharding problem: what its vertices hold at points of a program.

The program points are those of a plan: the fullest of each stretch of its kernels, also
inside of loops. What is live there under the plan is taken for every other assignment
as well; a plan that peaks elsewhere brings points of its own (`plan_within.py`). Of the
plan itself a row says exactly what the model of memory says (`costs/memory.py`).

At a point a tensor is held by its writer from when it is made until it is copied, and
by its relay while the copy is read; one that is read as it was made, under whatever
name, is held by its writer where it is made, and later by that relay. Arguments are
held throughout, but for those in the host's memory. What only this pair of specs needs
(the operand that a collective turns, a copy beside the relay's) is held by the two
choices together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.solver.memory_rows import MemoryRow

from ..costs.execution_order import Liveness
from ..costs.fusion import Traits
from ..costs.kernels import turns
from ..costs.memory import MemoryProfile
from ..sharding.spec import Spec, num_shards
from .held_values import (
    HeldValues,
    bytes_of_relays,
    lasting_reads,
    reading_less,
    tensors_of,
)
from .relay_choices import lasting_tensors
from .sharding_problem import ShardingProblem
from .spec_choices import SpecChoices

STRETCHES = 24  # of the outermost block
INNER_STRETCHES = 4  # of a loop's body
WORTH_A_ROW = 0.8  # of the peak
MOST_CONVERSIONS = 64  # that are rows before a plan makes them


@dataclass(frozen=True, eq=False)
class _Point:
    """What vertices hold at one point, and `bytes`: what the plan holds there.

    `whole` (bool [vertices]) are those with all their bytes. `turns` are (tensor, spec
    it is made in, bytes) of operands that a collective turns, `copies` (tensor, spec,
    bytes) of copies beside the relay's.
    """

    bytes: int
    whole: np.ndarray
    turns: tuple[tuple[int, Spec, int], ...] = ()
    copies: tuple[tuple[int, Spec, int], ...] = ()

    def __or__(self, other: _Point) -> _Point:
        return _Point(
            self.bytes + other.bytes,
            self.whole | other.whole,
            self.turns + other.turns,
            self.copies + other.copies,
        )


def memory_rows(
    problem: ShardingProblem, profile: MemoryProfile, choices: tuple[int, ...]
) -> tuple[MemoryRow, ...]:
    """What the problem's vertices hold together at the points of one of its plans.

    Args:
      problem: the problem, with relays that count memory.
      profile: the memory of a plan.
      choices: the same plan as an assignment of the problem.
    """
    fixed = _fixed(problem, profile)
    every = _Points(problem, profile, choices).of_block(0, STRETCHES)
    points = [fixed | each for each in every]
    worth = WORTH_A_ROW * max((each.bytes for each in points), default=0)
    points.sort(key=lambda each: -each.bytes)
    rows = [_row(problem, p, choices) for p in points or [fixed] if p.bytes >= worth]
    return tuple(rows)


def conversion_rows(
    problem: ShardingProblem,
    profile: MemoryProfile,
    choices: tuple[int, ...],
    least_bytes: float,
) -> tuple[MemoryRow, ...]:
    """Rows that say what conversions a plan does not make would need where it could.

    One for each tensor with a relay and each spec it could be made in, if to convert it
    from there takes a turned operand of `least_bytes` or more; of many, those with
    which the plan would hold the most. Those of inner blocks are left to the plans that
    make them.
    """
    points, fixed = _Points(problem, profile, choices), _fixed(problem, profile)
    liveness = profile.liveness[0]
    worth = WORTH_A_ROW * profile.peak_bytes - fixed.bytes
    columns = liveness.block.columns
    sizes, graph = problem.mesh.axis_sizes, problem.graph
    may_turn = _Turns()
    found: list[tuple[int, int, int, Spec, int]] = []
    for position, k in enumerate(liveness.order):
        if columns.operator[k] < 0 or columns.inner_bytes[k]:
            continue
        held = int(liveness.bytes[position])
        for index in columns.writes[slice(*columns.write_start[k : k + 2])].tolist():
            tensor = liveness.block.values[index].tensor
            relay = problem.relays.get(tensor)
            if relay is None or graph.tensors[tensor].type.bytes < least_bytes:
                continue
            made = problem.writers[tensor][1].choices
            targets = problem.vertices[relay].writes[0].choices
            for source in may_turn.sources(made, targets):
                amount = graph.tensors[tensor].type.bytes // num_shards(source, sizes)
                if amount >= max(least_bytes, worth - held):
                    found.append((held + amount, position, tensor, source, amount))
    found.sort(key=lambda each: -each[0])
    rows: list[MemoryRow] = []
    base: dict[int, MemoryRow] = {}
    for _, position, tensor, source, amount in found[:MOST_CONVERSIONS]:
        if position not in base:
            base[position] = _row(problem, fixed | points.at(0, position), choices)
        rows.append(_with_turn(problem, base[position], tensor, source, amount))
    return tuple(rows)


class _Turns:
    """Which specs of what writes a tensor turn it for some spec of its relay."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Spec, ...]] = {}

    def sources(self, made: SpecChoices, targets: SpecChoices) -> tuple[Spec, ...]:
        """Those specs; equal choices are looked at once."""
        key = id(made), id(targets)
        if key not in self._known:
            self._known[key] = tuple(
                s for s in made.distinct if any(turns(s, t) for t in targets.distinct)
            )
        return self._known[key]


def _fixed(problem: ShardingProblem, profile: MemoryProfile) -> _Point:
    """What is held throughout: arguments, and results that take none's memory."""
    inputs = [each for each in problem.graph.inputs if each.memory == "device"]
    whole = np.zeros(len(problem.vertices), bool)
    whole[[problem.writers[each.tensor][0] for each in inputs]] = True
    return _Point(profile.argument_bytes + profile.output_bytes, whole)


def _row(
    problem: ShardingProblem, point: _Point, choices: tuple[int, ...]
) -> MemoryRow:
    held = problem.choice_graph.bytes_by_node
    members = np.flatnonzero(point.whole).tolist()
    row = MemoryRow(tuple(members), tuple([held[vertex] for vertex in members]))
    for tensor, target, amount in point.copies:
        row = _with_copy(problem, row, choices, tensor, target, amount)
    for tensor, source, amount in point.turns:
        relay = problem.relays[tensor]
        target = problem.vertices[relay].writes[0].choices.of(choices[relay])
        if turns(source, target):
            row = _with_turn(problem, row, tensor, source, amount)
        else:  # a reader turns what the relay hands on
            writer, made = problem.writers[tensor]
            row = _with(row, writer, made.choices.are(source) * float(amount))
    rest = point.bytes - row.used(choices)
    return MemoryRow(row.nodes, row.weights, row.constant + rest)


def _with_copy(
    problem: ShardingProblem,
    row: MemoryRow,
    choices: tuple[int, ...],
    tensor: int,
    target: Spec,
    amount: int,
) -> MemoryRow:
    """A row with a copy beside the relay's, which one who reads it holds.

    Where the relay's (or the tensor) is in that spec it is what is read; of a tensor
    that lasts that takes no memory. Where no vertex reads the copy, as further copies
    are made of it, it is there if the tensor is not made so.
    """
    relay, columns = problem.relays.get(tensor), problem.columns
    holder, access = problem.writers[tensor]
    if relay is not None:
        holder, access = relay, problem.vertices[relay].writes[0]
    is_there = access.choices.are(target)
    reads = columns.reads
    for at in np.flatnonzero(reads.tensor == tensor).tolist():
        reader, specs = int(reads.vertex[at]), columns.choices[reads.choices[at]]
        if reader == relay or specs.of(choices[reader]) != target:
            continue
        row = _with(row, reader, specs.are(target) * float(amount))
        if tensor in lasting_tensors(problem.graph):
            row = _with(row, holder, ~is_there * float(amount))
            return MemoryRow(row.nodes, row.weights, row.constant - amount)
        if holder in row.nodes and holder != reader:
            held = row.weights[row.nodes.index(holder)]
            row = _with(row, holder, -np.minimum(held, amount) * is_there)
        return row
    return _with(row, holder, ~is_there * float(amount))


def _with_turn(
    problem: ShardingProblem, row: MemoryRow, tensor: int, source: Spec, amount: int
) -> MemoryRow:
    """A row with what turning a tensor from one spec into its relay's takes besides."""
    writer, made = problem.writers[tensor]
    relay = problem.relays[tensor]
    targets = problem.vertices[relay].writes[0].choices
    turned = np.array([turns(source, target) for target in targets.distinct], bool)
    row = _with(row, writer, made.choices.are(source) * float(amount))
    row = _with(row, relay, turned[targets.classes] * float(amount))
    return MemoryRow(row.nodes, row.weights, row.constant - amount)


def _with(row: MemoryRow, vertex: int, more: np.ndarray) -> MemoryRow:
    weights = dict(zip(row.nodes, row.weights, strict=True))
    weights[vertex] = weights[vertex] + more if vertex in weights else more
    return MemoryRow(tuple(weights), tuple(weights.values()), row.constant)


class _Points:
    def __init__(
        self,
        problem: ShardingProblem,
        profile: MemoryProfile,
        choices: tuple[int, ...],
    ) -> None:
        self.problem, self.profile, self.choices = problem, profile, choices
        self._bodies = {op.index: op.bodies for op in problem.graph.operators()}
        count = len(problem.graph.tensors)
        lasting = lasting_tensors(problem.graph) & problem.relays.keys()
        self._is_lasting = np.zeros(count + 1, bool)  # the last is no tensor
        self._is_lasting[list(lasting)] = True
        self._relay = np.full(count + 1, -1)
        self._relay[list(problem.relays)] = list(problem.relays.values())
        self._relay_bytes = bytes_of_relays(problem, lasting, choices)
        self._reads_less = reading_less(problem, choices, self._relay_bytes)
        made = [(tensor, writer) for tensor, (writer, _) in problem.writers.items()]
        self._writer = np.full(count + 1, -1)
        self._writer[[tensor for tensor, _ in made]] = [writer for _, writer in made]
        tensors = profile.plan.tensors
        is_copied = [bool(each.conversions) for each in tensors]
        self._is_copied = np.array([*is_copied, False])
        self._reader = self._readers()
        self._blocks: dict[int, HeldValues] = {}

    def _readers(self) -> np.ndarray:
        """[tensors] the relay through which each is read as it was made, or -1.

        What an operator gives but another name is read by that.
        """
        reader = np.where(self._is_copied | self._is_lasting, -1, self._relay)
        columns, reads = self.problem.graph.columns, self.problem.columns.reads
        is_relay = np.isin(reads.vertex, self._relay[self._relay >= 0])
        number = np.bincount(reads.tensor[~is_relay], minlength=len(reader))
        for row in np.flatnonzero(Traits.of(columns).renames)[::-1].tolist():
            op = columns.operators[row]
            tensors = [each for each in op.operands if isinstance(each, int)]
            for read, result in zip(tensors, op.results, strict=True):
                is_passed = number[read] == 1 and not self._is_copied[read]
                if is_passed and reader[read] < 0:
                    reader[read] = reader[result]
        return reader

    def of_block(self, block: int, stretches: int) -> Iterator[_Point]:
        liveness = self.profile.liveness[block]
        nothing = np.zeros(len(self.problem.vertices), bool)
        if not liveness.order:
            yield _Point(0, nothing)
        for position in fullest(liveness, stretches):
            kernel = liveness.block.kernels[liveness.order[position]]
            held = self.at(block, position)
            bodies = ()
            if kernel.inner_bytes and kernel.operator is not None:
                bodies = self._bodies[kernel.operator]
            inner = [
                point
                for body in bodies
                for point in self.of_block(body, INNER_STRETCHES)
            ]
            for point in inner or [_Point(0, nothing)]:
                yield held | point

    def at(self, block: int, position: int) -> _Point:
        """What is held while a kernel runs, without what its bodies hold."""
        liveness = self.profile.liveness[block]
        if block not in self._blocks:
            self._blocks[block] = self._held(liveness)
        held = self._blocks[block]
        kernel = liveness.block.kernels[liveness.order[position]]
        values = liveness.block.values
        total = int(liveness.bytes[position])
        turned: list[tuple[int, Spec, int]] = []
        copies: list[tuple[int, Spec, int]] = []
        if kernel.inner_bytes and kernel.operator is not None:
            if self._bodies[kernel.operator]:
                total -= kernel.inner_bytes
        elif kernel.inner_bytes:  # what only this conversion takes
            source, target = values[kernel.reads[0]], values[kernel.writes[0]]
            if source.tensor in self.problem.relays:
                turned.append((source.tensor, source.spec, kernel.inner_bytes))
            elif source.tensor in self.problem.writers:
                copies.append((source.tensor, target.spec, kernel.inner_bytes))
        is_live = (held.starts <= position) & (held.ends >= position)
        whole = np.zeros(len(self.problem.vertices), bool)
        vertices = held.vertex[is_live]
        whole[vertices[vertices >= 0]] = True
        is_read = (held.first_read <= position) & (held.last_read >= position)
        whole[held.read[is_read]] = True
        for index in np.flatnonzero(is_live & held.is_beside).tolist():
            value = values[index]
            copies.append((value.tensor, value.spec, value.bytes))
        return _Point(total, whole, tuple(turned), tuple(copies))

    def _held(self, liveness: Liveness) -> HeldValues:
        """Who holds each value of a block, and when relays of what lies outside would.

        Those hold from the first reading to the last that needs them.
        """
        block, count = liveness.block, len(self._relay) - 1
        tensor, is_copy = tensors_of(block.values)
        tensor = np.where((tensor >= 0) & (tensor < count), tensor, count)
        relay, writer = self._relay[tensor], self._writer[tensor]
        is_made = writer >= 0
        vertex = np.where((relay >= 0) & is_copy, relay, writer)
        is_beside = is_made & is_copy
        for index in np.flatnonzero(is_beside & (relay >= 0)).tolist():
            at = int(relay[index])
            held = self.problem.vertices[at].writes[0].choices.of(self.choices[at])
            is_beside[index] = block.values[index].spec != held
        starts = np.where(liveness.starts >= 0, liveness.starts, len(liveness.order))
        starts[list(liveness.borrowed)] = len(liveness.order)
        reader = self._reader[tensor]  # holds it from when it was made
        shared = np.flatnonzero((reader >= 0) & is_made & ~is_copy)
        ends = liveness.ends.copy()
        ends[shared] = np.minimum(starts[shared], ends[shared])
        position = np.empty(len(liveness.order), np.intp)
        position[list(liveness.order)] = np.arange(len(liveness.order))
        reading = lasting_reads(block, tensor, self._relay_bytes, self._reads_less)
        read, first, last = reading.spans(position)
        return HeldValues(
            np.concatenate(
                [np.where(is_made & ~is_beside, vertex, -1), reader[shared]]
            ),
            np.concatenate([is_beside, np.zeros(len(shared), bool)]),
            np.concatenate([starts, starts[shared] + 1]),
            np.concatenate([ends, liveness.ends[shared]]),
            *(self._relay[read], first, last),
        )


def fullest(liveness: Liveness, stretches: int) -> list[int]:
    """The position of the most bytes in each of some stretches of equal length."""
    count = len(liveness.order)
    borders = np.linspace(0, count, min(stretches, count) + 1).astype(int)
    return [
        int(low + liveness.bytes[low:high].argmax())
        for low, high in zip(borders[:-1], borders[1:], strict=True)
        if high > low
    ]
