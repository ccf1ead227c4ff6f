"""Rows of memory of a sharding problem: what its vertices hold at points of a program.

The program points are those of a plan: the fullest of each stretch of its kernels, also
inside of loops. What is live there under the plan is taken for every other assignment
as well; a plan that peaks elsewhere brings points of its own (`budget_search.py`). Of
the plan itself a row says exactly what the model of memory says (`costs/memory.py`).

At a point a tensor is held by its writer from when it is made until it is copied, and
by its relay while the copy is read; one that is read as it was made, under whatever
name, is held by its writer where it is made, and later by that relay. Arguments are
held throughout, but for those in the host's memory. What only this pair of specs needs
(the operand that a collective turns, a copy beside the relay's) is held by the two
choices together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.memory_rows import MemoryRow

from ..costs.kernels import turns
from ..costs.memory import MemoryProfile
from ..sharding.spec import Spec, num_shards
from .plan_points import PlanPoints, Point
from .point_rows import row_of_point, rows_of_point, with_turn
from .sharding_problem import ShardingProblem
from .spec_choices import SpecChoices

STRETCHES = 24  # of the outermost block
WORTH_A_ROW = 0.8  # of the peak
WORTH_LENDING = 0.01  # of what a point holds
MOST_CONVERSIONS = 64  # that are rows before a plan makes them


def memory_rows(
    problem: ShardingProblem,
    profile: MemoryProfile,
    choices: tuple[int, ...],
    layers: np.ndarray | None = None,
    *,
    packed: bool = False,
) -> tuple[MemoryRow, ...]:
    """What the problem's vertices hold together at the points of one of its plans.

    Args:
      problem: the problem, with relays that count memory.
      profile: the memory of a plan.
      choices: the same plan as an assignment of the problem.
      layers: [n, p] vertices of equal layers, of which rows say the same.
      packed: with what the compiler leaves free below what is in use, as if it did so
        for every assignment.
    """
    fixed = _fixed(problem, profile)
    found = PlanPoints(problem, profile, choices)
    points = [
        fixed | each
        for tells_lent in (False, True)
        for each in found.of_program(STRETCHES, tells_lent=tells_lent, packed=packed)
        if not tells_lent or each.lent_bytes >= WORTH_LENDING * each.bytes
    ]
    worth = WORTH_A_ROW * max((each.bytes for each in points), default=0)
    points.sort(key=lambda each: -each.bytes)
    return tuple(
        row
        for point in points or [fixed]
        if point.bytes >= worth
        for row in rows_of_point(problem, point, choices, layers)
    )


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
    points, fixed = PlanPoints(problem, profile, choices), _fixed(problem, profile)
    liveness = profile.liveness[0]
    worth = WORTH_A_ROW * profile.live_bytes - fixed.bytes
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
            base[position] = row_of_point(
                problem, fixed | points.at(0, position), choices
            )
        rows.append(with_turn(problem, base[position], tensor, source, amount))
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
                s for s in made.distinct if turns(s, targets.distinct).any()
            )
        return self._known[key]


def _fixed(problem: ShardingProblem, profile: MemoryProfile) -> Point:
    """What is held throughout: arguments, and results that take none's memory."""
    inputs = [each for each in problem.graph.inputs if each.memory == "device"]
    nothing = Point.empty(len(problem.vertices))
    whole = nothing.whole.copy()
    whole[[problem.writers[each.tensor][0] for each in inputs]] = True
    held = profile.argument_bytes + profile.output_bytes
    return replace(nothing, bytes=held, whole=whole)
