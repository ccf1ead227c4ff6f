"""The cheapest plan that fits a memory budget: the solver's rows, and the model's word.

The solver sees memory as live sets at program points (`program_points.py`), linear in
its choices; a plan's own figure comes from its kernels (`costs/memory.py`). The two are
brought together in rounds:

  1. solve; stop if the plan fits by its own figure
  2. add the plan's own points as live sets (lazily: few of all points ever matter)
  3. where these hold less than the plan's figure, lower the solver's limit by the ratio

The bound is that of solves at the full limit: every point added is one of the problem.
If nothing fits, the plan of the least memory found says what would do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import Infeasible
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..costs.memory import MemoryProfile, memory_profile
from ..graph.op_graph import OpGraph
from ..methods.restrictions import Limit, restrict
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.resharding import Resharder
from .intra_op import IntraOpSolution, plan_intra_op, read_plan
from .memory_users import infeasible_error
from .program_points import live_sets
from .sharding_problem import ShardingProblem, build_problem

BUDGET_GAP = 1e-2
MOST_ROUNDS = 4
MOST_LEAST_ROUNDS = 2
ABOVE_LEAST = 1.02
MOST_KNOWN = 40
FEWEST_SECONDS, MOST_SECONDS = 4.0, 60.0  # of one solve
CHOICES_A_SECOND = 1500.0
_log = logging.getLogger("autopar")


def plan_within(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    budget_bytes: int,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
    gap: float = 1e-4,
) -> IntraOpSolution:
    """The cheapest plan whose predicted peak is at most `budget_bytes` a device.

    `gap` is the relative distance from the bound at which the solver stops; where the
    budget binds it is at least `BUDGET_GAP`.

    Raises:
      InfeasiblePlanError: no plan was found that fits; it names the least budget that
        would do and what takes the most memory then.
    """
    free = plan_intra_op(
        graph, mesh, cluster, pins=pins, restrictions=restrictions, gap=gap
    )
    if free.plan.predicted.peak_bytes <= budget_bytes:
        return free
    resharder = Resharder(mesh, cluster)
    problem = build_problem(graph, mesh, cluster, resharder, pins, counts_memory=True)
    problem = restrict(problem, restrictions, cluster)
    return _WithinBudget(problem, cluster, resharder, budget_bytes, gap).run(free)


@dataclass(frozen=True, eq=False)
class _Candidate:
    assignment: Assignment
    profile: MemoryProfile


class _WithinBudget:
    def __init__(
        self,
        problem: ShardingProblem,
        cluster: Cluster,
        resharder: Resharder,
        budget_bytes: int,
        gap: float,
    ) -> None:
        self.problem, self.cluster, self.resharder = problem, cluster, resharder
        self.budget_bytes, self.gap = budget_bytes, max(gap, BUDGET_GAP)
        self.free = solve(self.problem.choice_graph, gap=gap)
        self.live_sets: tuple[tuple[int, ...], ...] = ()
        self.known: tuple[tuple[int, ...], ...] = ()
        self.bound = -inf
        self.seen: list[_Candidate] = []

    def run(self, free: IntraOpSolution) -> IntraOpSolution:
        self.bound = free.assignment.bound
        profile = memory_profile(self.problem.graph, free.plan)
        self._add_points(profile)
        full = limit = float(self.budget_bytes - profile.output_bytes)
        for _ in range(MOST_ROUNDS):
            try:
                found = self._solve(limit)
            except Infeasible:
                break
            if limit == full:
                self.bound = max(self.bound, found.assignment.bound)
            if self._fits(found):
                return self._solution(found)
            limit = self._next_limit(found, limit)
        self._look_for_least()
        return self._best(profile)

    def _solve(self, limit: float) -> _Candidate:
        graph = replace(
            self.problem.choice_graph, live_sets=self.live_sets, budget=max(limit, 0.0)
        )
        seconds = FEWEST_SECONDS + graph.num_choices / CHOICES_A_SECOND
        assignment = solve(
            graph,
            gap=self.gap,
            time_limit_seconds=min(seconds, MOST_SECONDS),
            free=self.free,
            known=self.known,
        )
        self.known = tuple(dict.fromkeys((*self.known, *assignment.seen)))[-MOST_KNOWN:]
        return self._see(assignment)

    def _see(self, assignment: Assignment) -> _Candidate:
        plan = read_plan(self.problem, assignment, self.cluster, self.resharder)
        profile = memory_profile(self.problem.graph, plan)
        self.seen.append(_Candidate(assignment, profile))
        return self.seen[-1]

    def _fits(self, found: _Candidate) -> bool:
        return found.profile.peak_bytes <= self.budget_bytes

    def _add_points(self, profile: MemoryProfile) -> tuple[tuple[int, ...], ...]:
        points = live_sets(self.problem, profile)
        self.live_sets = tuple(dict.fromkeys((*self.live_sets, *points)))
        return points

    def _next_limit(self, found: _Candidate, limit: float) -> float:
        """The same limit if the plan's own points rule it out, else one lowered."""
        points = self._add_points(found.profile)
        graph = replace(self.problem.choice_graph, live_sets=points)
        seen_bytes = graph.peak_bytes(found.assignment.choices)
        _log.info(
            "round: limit %.0f, predicted %d, by live sets %.0f, cost %.3g",
            *(limit, found.profile.peak_bytes, seen_bytes, found.assignment.cost),
        )
        if seen_bytes > limit * (1 + 1e-6):
            return limit
        return min(limit, seen_bytes) * self.budget_bytes / found.profile.peak_bytes

    def _look_for_least(self) -> None:
        """Sees the cheapest plans of nearly the least memory."""
        for _ in range(MOST_LEAST_ROUNDS):
            if any(map(self._fits, self.seen)):
                return
            least = self._least_limit()
            try:
                found = self._solve(least * ABOVE_LEAST)
            except Infeasible:
                return
            self._add_points(found.profile)

    def _least_limit(self) -> float:
        """The least limit that the solver finds a plan for, whatever it costs."""
        try:
            self._solve(0.0)
        except Infeasible as error:
            return error.least_budget if error.least_budget < inf else 0.0
        return 0.0

    def _best(self, free: MemoryProfile) -> IntraOpSolution:
        fitting = [found for found in self.seen if self._fits(found)]
        if fitting:
            return self._solution(min(fitting, key=lambda each: each.assignment.cost))
        profiles = [free, *(each.profile for each in self.seen)]
        least = min(profiles, key=lambda profile: profile.peak_bytes)
        raise infeasible_error(least, self.budget_bytes)

    def _solution(self, found: _Candidate) -> IntraOpSolution:
        """With the gap against the bound of the problem at the full limit."""
        bound = min(self.bound, found.assignment.cost)
        assignment = replace(found.assignment, bound=bound)
        plan = found.profile.plan
        predicted = replace(plan.predicted, optimality_gap=float(assignment.gap))
        return IntraOpSolution(replace(plan, predicted=predicted), assignment)
