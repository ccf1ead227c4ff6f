"""The cheapest plan that fits a memory budget: the solver's rows, and the model's word.

The solver sees memory as rows at program points, linear in its choices; a plan's own
figure comes from its kernels (`costs/memory.py`). The two are brought together in
rounds:

  1. solve within the rows; stop if the plan fits by its own figure
  2. add the plan's own points as rows (lazily: few of all points ever matter)
  3. lower what a row says, where the model says less of a plan that was met

So a plan that is returned fits by its own figure, and its bound is that of the problem
with the rows of the plans met. If nothing fits, the plan of the least memory found says
what would do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from autopar.solver.assignment import Assignment
from autopar.solver.budget import solve_within_rows
from autopar.solver.choice_graph import Infeasible
from autopar.solver.memory_rows import MemoryRow
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..costs.memory import MemoryProfile, memory_profile
from ..graph.op_graph import OpGraph
from ..methods.restrictions import Limit, restrict
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.resharding import Resharder
from .intra_op import IntraOpSolution, plan_intra_op, read_plan
from .memory_users import infeasible_error
from .program_points import conversion_rows, memory_rows
from .relay_choices import lasting_tensors, without_needless_copies
from .sharding_problem import ShardingProblem, build_problem

BUDGET_GAP = 1e-2
MOST_ROUNDS = 8
MARGINS = (0.97, 0.93, 0.88)  # of the budget, once rounds are used up
MOST_LEAST_ROUNDS = 2
WORTH_A_TURN = 0.03  # of the budget: conversions that take less come as they are met
MOST_ROWS = 16  # of one plan
WORTH_SOLVING_AGAIN = 0.005  # of the budget, by which a row was lowered
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
    return _WithinBudget(problem, cluster, resharder, budget_bytes, gap).run()


@dataclass(frozen=True, eq=False)
class _Candidate:
    assignment: Assignment
    profile: MemoryProfile

    @property
    def peak_bytes(self) -> int:
        return self.profile.peak_bytes


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
        self.free = solve(problem.choice_graph, gap=BUDGET_GAP / 10)
        self.bound, self.least_bound = self.free.bound, 0.0
        self.seen: list[_Candidate] = []
        self.rows: list[MemoryRow] = []

    def run(self) -> IntraOpSolution:
        start = perf_counter()
        self._add_rows(self._see(self.free))
        self._add_conversions(self.seen[0])
        self._solve_in_rounds()
        if self._best() is None:
            self._solve_with_margins()
        if self._best() is None:
            self._look_for_least()
        best = self._best()
        if best is None:
            least = min(self.seen, key=lambda each: each.peak_bytes).profile
            bound = int(min(self.least_bound, least.peak_bytes))
            raise infeasible_error(least, self.budget_bytes, bound)
        solution = self._solution(best)
        _log.info(
            "%s: %d plans met, %d rows of memory, gap %.2f%%, %.1f s",
            *(self.problem.graph.name, len(self.seen), len(self.rows)),
            *(100 * solution.assignment.gap, perf_counter() - start),
        )
        return solution

    def _solve_in_rounds(self) -> None:
        """Adds rows until the solver's plan fits, or nothing fits the rows."""
        for _ in range(MOST_ROUNDS):
            try:
                found = self._solve(self.budget_bytes)
            except Infeasible:
                return
            self.bound = max(self.free.bound, found.assignment.bound)
            lowered = self._lower_refuted()
            if found.peak_bytes <= self.budget_bytes and not lowered:
                return
            if found.peak_bytes > self.budget_bytes:
                self._add_rows(found)

    def _solve_with_margins(self) -> None:
        """Leaves room for points that were not met; the bound stays."""
        for margin in MARGINS:
            try:
                found = self._solve(margin * self.budget_bytes)
            except Infeasible:
                return
            if found.peak_bytes <= self.budget_bytes:
                return

    def _look_for_least(self) -> None:
        """Sees plans of ever less memory, whatever they cost."""
        for number in range(MOST_LEAST_ROUNDS):
            try:
                self._solve(0.0)
            except Infeasible as error:
                if number == 0:
                    self.least_bound = error.least_budget_bound
                if error.choices is None or self._met(error.choices):
                    return
                choices = tuple(error.choices)
                cost = self.problem.choice_graph.cost(choices)
                found = self._see(replace(self.free, choices=choices, cost=cost))
                self._add_rows(found)
                if found.peak_bytes <= self.budget_bytes:
                    return

    def _solve(self, limit: float) -> _Candidate:
        assignment = solve_within_rows(
            self.problem.choice_graph,
            self.rows,
            limit,
            gap=self.gap,
            free=self.free,
            known=[each.assignment.choices for each in self.seen],
        )
        return self._see(assignment)

    def _met(self, choices: Sequence[int]) -> bool:
        normal = self._normal(choices)
        return any(each.assignment.choices == normal for each in self.seen)

    def _see(self, assignment: Assignment) -> _Candidate:
        choices = self._normal(assignment.choices)
        cost = self.problem.choice_graph.cost(choices)
        assignment = replace(assignment, choices=choices, cost=cost)
        profile = memory_profile(self.problem.graph, self._plan(assignment))
        self.seen.append(_Candidate(assignment, profile))
        return self.seen[-1]

    def _normal(self, choices: Sequence[int]) -> tuple[int, ...]:
        problem, lasting = self.problem, lasting_tensors(self.problem.graph)
        relays = {t: v for t, v in problem.relays.items() if t in lasting}
        return without_needless_copies(
            choices,
            {t: (v, problem.vertices[v].writes[0].choices) for t, v in relays.items()},
            {t: (v, a.choices) for t, (v, a) in problem.writers.items() if t in relays},
        )

    def _add_rows(self, found: _Candidate) -> None:
        choices = found.assignment.choices
        rows = memory_rows(self.problem, found.profile, choices)
        self.rows += [self._lowered(row) for row in rows[:MOST_ROWS]]

    def _add_conversions(self, found: _Candidate) -> None:
        choices, least = found.assignment.choices, WORTH_A_TURN * self.budget_bytes
        rows = conversion_rows(self.problem, found.profile, choices, least)
        self.rows += [self._lowered(row) for row in rows]

    def _lowered(self, row: MemoryRow) -> MemoryRow:
        """A row that says no more of the plans met than the model does."""
        beyond = max(
            row.used(each.assignment.choices) - each.peak_bytes for each in self.seen
        )
        return replace(row, constant=row.constant - max(beyond, 0.0))

    def _lower_refuted(self) -> bool:
        """Lowers the rows that say too much; whether that is worth another solve."""
        rows = [self._lowered(row) for row in self.rows]
        most = max(
            (old.constant - new.constant)
            for old, new in zip(self.rows, rows, strict=True)
        )
        self.rows = rows
        return most > WORTH_SOLVING_AGAIN * self.budget_bytes

    def _best(self) -> _Candidate | None:
        """The cheapest plan met that fits."""
        fitting = [e for e in self.seen if e.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda each: each.assignment.cost, default=None)

    def _plan(self, assignment: Assignment) -> ShardingPlan:
        return read_plan(self.problem, assignment, self.cluster, self.resharder)

    def _solution(self, found: _Candidate) -> IntraOpSolution:
        """With the gap against the bound of the problem at the full budget."""
        bound = min(self.bound, found.assignment.cost)
        peak = float(found.peak_bytes)
        assignment = replace(found.assignment, bound=bound, peak_bytes=peak)
        plan = found.profile.plan
        predicted = replace(plan.predicted, optimality_gap=float(assignment.gap))
        return IntraOpSolution(replace(plan, predicted=predicted), assignment)
