"""The cheapest plan that fits a memory budget: the solver's rows, and the model's word.

The solver sees memory as rows at program points, linear in its choices; a plan's own
figure comes from its kernels (`costs/memory.py`). Whenever the solver holds a complete
assignment, the model is asked. If the plan does not fit, the points at which it is
fullest become rows (`program_points.py`): few of all points ever matter. So no plan is
returned that does not fit by its own figure, and the bound is that of the problem with
the rows met. If nothing fits, the plan of the least memory found says what would do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from autopar.solver.array_pool import ArrayPool
from autopar.solver.assignment import Assignment
from autopar.solver.budget import GUARD_SECONDS, BudgetSearch
from autopar.solver.choice_graph import Infeasible
from autopar.solver.memory_rows import Verdict, most_spread
from autopar.solver.search import Search
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
from .program_points import memory_rows
from .sharding_problem import ShardingProblem, build_problem

BUDGET_GAP = 1e-2
NEGLECTED = 0.01  # of the budget: bytes by which choices may differ unseen
MOST_ROWS = 16  # of one plan
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
        self.num_asked = 0

    def run(self) -> IntraOpSolution:
        start = perf_counter()
        graph = self.problem.choice_graph
        free = solve(graph, gap=BUDGET_GAP / 10)
        deadline = start + GUARD_SECONDS
        search = Search(graph, self.gap, deadline, ArrayPool())
        search.raise_bound(free.bound)
        held = most_spread(graph, NEGLECTED * self.budget_bytes)
        within = BudgetSearch(search, self.budget_bytes, self.check, held)
        try:
            within.run([free.choices])
        except Infeasible as error:
            assert error.choices is not None, "some plan was asked about"
            least = self._profile(tuple(error.choices))
            bound = int(error.least_budget_bound)
            raise infeasible_error(least, self.budget_bytes, bound) from None
        _log.info(
            "%s: %d plans asked about memory, %d rows, gap %.2f%%, %.1f s",
            *(self.problem.graph.name, self.num_asked, len(within.rows)),
            *(100 * search.result().gap, perf_counter() - start),
        )
        return self._solution(search.result())

    def check(self, choices: tuple[int, ...]) -> Verdict:
        """What the model of memory says of an assignment."""
        self.num_asked += 1
        profile = self._profile(choices)
        rows = memory_rows(self.problem, profile, choices)
        return Verdict(float(profile.peak_bytes), rows[:MOST_ROWS])

    def _profile(self, choices: tuple[int, ...]) -> MemoryProfile:
        assignment = Assignment(choices, 0.0, 0.0, 0.0)
        return memory_profile(self.problem.graph, self._plan(assignment))

    def _plan(self, assignment: Assignment) -> ShardingPlan:
        return read_plan(self.problem, assignment, self.cluster, self.resharder)

    def _solution(self, assignment: Assignment) -> IntraOpSolution:
        plan = self._plan(assignment)
        peak = memory_profile(self.problem.graph, plan).peak_bytes
        return IntraOpSolution(plan, replace(assignment, peak_bytes=float(peak)))
