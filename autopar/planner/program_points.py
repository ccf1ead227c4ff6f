"""Rows of memory of a sharding problem: what its vertices hold at points of a program.

The program points are those of a plan: the fullest of each stretch of its kernels, also
inside of loops. What is live there under the plan is taken for every other assignment
as well; a plan that peaks elsewhere brings points of its own (`plan_within.py`). Of the
plan itself a row says exactly what the model of memory says (`costs/memory.py`).

At a point a tensor is held by its writer from when it is made until it is copied, and
by its relay while the copy is read; a tensor with a relay that is read as it was made
is the relay's. Arguments are held throughout, but for those in the host's memory. What
only this pair of specs needs (the operand that a collective turns, a copy beside the
relay's) is held by the two choices together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.memory_rows import MemoryRow

from ..costs.execution_order import Liveness
from ..costs.kernels import Value, turns
from ..costs.memory import MemoryProfile
from ..sharding.spec import Spec, num_shards
from .relay_choices import lasting_tensors
from .sharding_problem import ShardingProblem

STRETCHES = 24  # of the outermost block
INNER_STRETCHES = 4  # of a loop's body
WORTH_A_ROW = 0.8  # of the peak


@dataclass(eq=False)
class _Point:
    """What vertices hold at one point, and `bytes`: what the plan holds there.

    `whole` are vertices with all their bytes. `turns` are (tensor, spec it is made in,
    bytes) of operands that a collective turns, `copies` (tensor, spec, bytes) of copies
    beside the relay's.
    """

    bytes: int = 0
    whole: set[int] = field(default_factory=set)
    turns: list[tuple[int, Spec, int]] = field(default_factory=list)
    copies: list[tuple[int, Spec, int]] = field(default_factory=list)

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
    points = [fixed | each for each in _Points(problem, profile).of_block(0, STRETCHES)]
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
    from there takes a turned operand of `least_bytes` or more. Those of inner blocks
    are left to the plans that make them.
    """
    points, rows = _Points(problem, profile), []
    liveness = profile.liveness[0]
    fixed = _fixed(problem, profile)
    for position, k in enumerate(liveness.order):
        kernel = liveness.block.kernels[k]
        for index in kernel.writes if kernel.operator is not None else ():
            value = liveness.block.values[index]
            relay = problem.relays.get(value.tensor)
            size = problem.graph.tensors[value.tensor].type.bytes
            if relay is None or size < least_bytes or kernel.inner_bytes:
                continue
            base = _row(problem, fixed | points.at(0, position), choices)
            specs = problem.vertices[relay].writes[0].choices.distinct
            for source in problem.writers[value.tensor][1].choices.distinct:
                amount = size // num_shards(source, problem.mesh.axis_sizes)
                if amount >= least_bytes and any(turns(source, t) for t in specs):
                    tensor = value.tensor
                    rows.append(_with_turn(problem, base, tensor, source, amount))
    return tuple(rows)


def _fixed(problem: ShardingProblem, profile: MemoryProfile) -> _Point:
    """What is held throughout: arguments, and results that take none's memory."""
    inputs = [each for each in problem.graph.inputs if each.memory == "device"]
    return _Point(
        profile.argument_bytes + profile.output_bytes,
        {problem.writers[each.tensor][0] for each in inputs},
    )


def _row(
    problem: ShardingProblem, point: _Point, choices: tuple[int, ...]
) -> MemoryRow:
    nodes = problem.choice_graph.nodes
    weights = {vertex: nodes[vertex].bytes for vertex in sorted(point.whole)}
    row = MemoryRow(tuple(weights), tuple(weights.values()))
    for tensor, target, amount in point.copies:
        writer, made = problem.writers[tensor]
        needs = (made.choices.specs != np.array(target)).any(axis=1)
        row = _with(row, writer, needs * float(amount))
    for tensor, source, amount in point.turns:
        relay = problem.relays[tensor]
        target = problem.vertices[relay].writes[0].choices.of(choices[relay])
        if turns(source, target):
            row = _with_turn(problem, row, tensor, source, amount)
        else:  # a reader turns what the relay hands on
            writer, made = problem.writers[tensor]
            makes = (made.choices.specs == np.array(source)).all(axis=1)
            row = _with(row, writer, makes * float(amount))
    rest = point.bytes - row.used(choices)
    return MemoryRow(row.nodes, row.weights, row.constant + rest)


def _with_turn(
    problem: ShardingProblem, row: MemoryRow, tensor: int, source: Spec, amount: int
) -> MemoryRow:
    """A row with what turning a tensor from one spec into its relay's takes besides."""
    writer, made = problem.writers[tensor]
    relay = problem.relays[tensor]
    targets = problem.vertices[relay].writes[0].choices
    turned = np.array([turns(source, target) for target in targets.distinct], bool)
    makes = (made.choices.specs == np.array(source)).all(axis=1)
    row = _with(row, writer, makes * float(amount))
    row = _with(row, relay, turned[targets.classes] * float(amount))
    return MemoryRow(row.nodes, row.weights, row.constant - amount)


def _with(row: MemoryRow, vertex: int, more: np.ndarray) -> MemoryRow:
    weights = dict(zip(row.nodes, row.weights, strict=True))
    weights[vertex] = weights[vertex] + more if vertex in weights else more
    return MemoryRow(tuple(weights), tuple(weights.values()), row.constant)


class _Points:
    def __init__(self, problem: ShardingProblem, profile: MemoryProfile) -> None:
        self.problem, self.profile = problem, profile
        self._bodies = {op.index: op.bodies for op in problem.graph.operators()}
        self._lasting = lasting_tensors(problem.graph) & problem.relays.keys()

    def of_block(self, block: int, stretches: int) -> Iterator[_Point]:
        liveness = self.profile.liveness[block]
        if not liveness.order:
            yield _Point()
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
            for point in inner or [_Point()]:
                yield held | point

    def at(self, block: int, position: int) -> _Point:
        """What is held while a kernel runs, without what its bodies hold."""
        liveness = self.profile.liveness[block]
        kernel = liveness.block.kernels[liveness.order[position]]
        point = _Point(int(liveness.bytes[position]))
        if kernel.inner_bytes and kernel.operator is not None:
            point.bytes -= kernel.inner_bytes
        elif kernel.inner_bytes:
            source, target = kernel.reads[0], kernel.writes[0]
            values = liveness.block.values
            self._add_turn(point, values[source], values[target], kernel.inner_bytes)
        for index in liveness.live(position):
            if index not in liveness.borrowed:
                self._add(point, liveness.block.values[index])
        for tensor, (first, last) in self._reads(liveness).items():
            if first <= position <= last:
                point.whole.add(self.problem.relays[tensor])
        return point

    def _reads(self, liveness: Liveness) -> dict[int, tuple[int, int]]:
        """First and last position at which what lies outside is read, by tensor: a copy
        of it would be there. What replaces it needs no copy."""
        found: dict[int, tuple[int, int]] = {}
        values, replaced = liveness.block.values, set(liveness.block.replaced)
        for position, k in enumerate(liveness.order):
            kernel = liveness.block.kernels[k]
            for index in kernel.reads:
                value = values[index]
                is_replaced = any((index, new) in replaced for new in kernel.writes)
                if value.tensor in self._lasting and not is_replaced:
                    first, _ = found.get(value.tensor, (position, position))
                    found[value.tensor] = first, position
        return found

    def _add(self, point: _Point, value: Value) -> None:
        problem, tensor = self.problem, value.tensor
        if tensor not in problem.writers:
            return
        writer, _ = problem.writers[tensor]
        relay = problem.relays.get(tensor)
        plan = self.profile.plan.tensors[tensor]
        if value.is_copy:
            if relay is not None:
                point.whole.add(relay)
            else:
                point.copies.append((tensor, value.spec, value.bytes))
        elif relay is not None and not plan.conversions and not value.is_outside:
            point.whole.add(relay)
        else:
            point.whole.add(writer)

    def _add_turn(
        self, point: _Point, source: Value, target: Value, amount: int
    ) -> None:
        """Bytes that only the conversion from one spec to the other takes."""
        tensor = source.tensor
        if tensor in self.problem.relays:
            point.turns.append((tensor, source.spec, amount))
        elif tensor in self.problem.writers:
            point.copies.append((tensor, target.spec, amount))


def fullest(liveness: Liveness, stretches: int) -> list[int]:
    """The position of the most bytes in each of some stretches of equal length."""
    count = len(liveness.order)
    borders = np.linspace(0, count, min(stretches, count) + 1).astype(int)
    return [
        int(low + liveness.bytes[low:high].argmax())
        for low, high in zip(borders[:-1], borders[1:], strict=True)
        if high > low
    ]
