"""What reduction and messages leave over, as an integer linear program.

Variables: x[v, c] in {0, 1} for choice c of node v; y[e, a, b] in [0, 1] for a pair of
classes of edge e, absent where the pair is forbidden.

    minimise    sum costs_v[c] x[v, c] + sum costs_e[a, b] y[e, a, b]   (_objective)
    subject to  sum_c x[v, c] = 1                                       (_add_choice)
                sum_b y[e, a, b] = sum_{c in a} x[first, c]             (_add_pairs)
                sum_a y[e, a, b] = sum_{c in b} x[second, c]            (_add_pairs)
                sum_{v in live} bytes_v[c] x[v, c] <= budget            (_add_memory)
                the objective <= cutoff, where there is one             (_add_cutoff)

The cutoff is a row, as HiGHS takes plans above its own `objective_bound` for optimal.
Memory rows are added lazily: only those that a solution without them breaks. PuLP
builds the program and HiGHS solves it, starting from the plan we hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import pulp

from .checks import Checks, seconds_of_check
from .choice_graph import ChoiceGraph, allowed
from .clock import Clock

MOST_PAIRS = 100_000
MOST_ROWS_AT_ONCE = 8
COST_SCALE, BYTES_SCALE = 1e4, 1e3
# HiGHS solves its linear programs to 1e-7 a variable.
ROUNDING = 1e-8 * COST_SCALE
ITERATIONS_OF_NODE = 30
# Seconds of a usual core: of an iteration, its part for each variable, and of building.
_ITERATION, _ITERATION_OF_VARIABLE, _BUILT_VARIABLE = 2e-5, 4e-8, 3e-5


@dataclass(frozen=True)
class IlpResult:
    """`bound` is below every assignment within budget, inf when there is none.

    With a cutoff it is at most that.

    `choices` is a plan within budget, or None if the work was up before one was found.
    """

    bound: float
    choices: tuple[int, ...] | None
    num_rows: int

    def __str__(self) -> str:
        return f"IlpResult: bound {self.bound:.6g}, {self.num_rows} memory rows"


def is_small_enough(
    graph: ChoiceGraph, work_limit: float, most_pairs: int = MOST_PAIRS
) -> bool:
    """Whether the program is worth building, which may take half of its work.

    Larger ones are not ended in time: HiGHS seldom looks at its limits then.
    """
    num_pairs = sum(edge.costs.size for edge in graph.edges)
    return num_pairs <= min(most_pairs, work_limit / 2 / _BUILT_VARIABLE)


def solve_ilp(
    graph: ChoiceGraph,
    *,
    gap: float = 1e-4,
    work_limit: float = 60.0,
    clock: Clock | None = None,
    initial: Sequence[int] | None = None,
    cost: float = inf,
    cutoff: float = inf,
) -> IlpResult:
    """Solves a graph to a relative gap, or as far as the work goes.

    Args:
        graph: the graph; its live sets and budget are kept if it has any.
        gap: wanted (cost - bound) / cost.
        work_limit: seconds of work of all solves, with the rows added between them.
        clock: what is told of the work.
        initial: a plan within budget to start from.
        cost: the cost of a plan already known, which says what a gap is relative to.
        cutoff: plans that cost as much or more are not looked for.
    """
    clock = clock or Clock()
    deadline = clock.spent + work_limit
    return _Program(graph, initial, cost, clock, cutoff).run(gap, deadline)


class _WarmHiGHS(pulp.HiGHS):
    """HiGHS through PuLP, which passes on neither a starting point nor a callback."""

    start: dict[str, float] | None = None
    most_checks: float = inf

    def callSolver(self, lp: Any) -> None:
        Checks(lp.solverModel, self.most_checks)
        if self.start is not None:
            names = [variable.name for variable in lp.variables()]
            known = [i for i, name in enumerate(names) if name in self.start]
            values = [self.start[names[i]] for i in known]
            lp.solverModel.setSolution(
                len(known), np.array(known, np.int32), np.array(values, np.float64)
            )
        lp.solverModel.run()

    def findSolutionValues(self, lp: Any) -> tuple[int, int]:
        try:
            return super().findSolutionValues(lp)
        except KeyError:  # PuLP does not know the status at the limit on nodes
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


class _Program:
    def __init__(
        self,
        graph: ChoiceGraph,
        initial: Sequence[int] | None,
        cost: float,
        clock: Clock,
        cutoff: float = inf,
    ) -> None:
        self.graph, self.clock, self.cutoff = graph, clock, cutoff
        self.initial = None if initial is None else tuple(initial)
        self.known_cost = cost if initial is None else graph.cost(initial)
        self.scale = COST_SCALE / self._size_of_costs()
        self.problem = pulp.LpProblem("assignment", pulp.LpMinimize)
        self.x = [self._add_choice(v) for v in range(len(graph.nodes))]
        self.y = [self._add_pairs(e) for e in range(len(graph.edges))]
        objective = self._objective()
        self.problem.setObjective(objective)
        if cutoff < inf:
            self._add_cutoff(objective)
        self.rows: set[int] = set()

    def run(self, gap: float, deadline: float) -> IlpResult:
        best, bound = self.initial, -inf
        best_cost = inf if best is None else self.graph.cost(best)
        while (left := deadline - self.clock.now()) > 0:
            target = gap * abs(min(best_cost, self.known_cost))
            target = target if target < inf else 0.0
            status, found_bound = self._solve(best, target / 2, gap / 2, left)
            if status == "infeasible":
                return IlpResult(self.cutoff, None, len(self.rows))
            bound = max(bound, found_bound)
            found = self._found_choices()
            broken = [] if found is None else self._broken_live_sets(found)
            if found is not None and not broken:
                cost = self.graph.cost(found)
                if cost < best_cost:
                    best, best_cost = found, cost
            if not set(broken) - self.rows:
                break
            for live in broken:
                self._add_memory(live)
        bound = min(bound, best_cost, self.cutoff)
        return IlpResult(bound, best, len(self.rows))

    def _solve(
        self, start: tuple[int, ...] | None, gap_abs: float, gap: float, seconds: float
    ) -> tuple[str, float]:
        size = sum(map(len, self.x)) + sum(map(len, self.y))
        iteration = _ITERATION + _ITERATION_OF_VARIABLE * size
        time_left = self.clock.time_left
        solver = _WarmHiGHS(
            msg=False,
            timeLimit=None if time_left == inf else time_left,
            parallel="off",
            mip_max_nodes=max(int(seconds / (iteration * ITERATIONS_OF_NODE)), 1),
            gapAbs=gap_abs * self.scale,
            gapRel=gap if gap_abs == 0 else 0.0,
            mip_feasibility_tolerance=1e-9,
            primal_feasibility_tolerance=1e-9,
        )
        solver.most_checks = seconds / seconds_of_check(size)
        if start is not None:
            solver.start = {
                variable.name: float(choice == start[v])
                for v, node in enumerate(self.x)
                for choice, variable in enumerate(node)
            }
        self.problem.solve(solver)
        if self.problem.status == pulp.LpStatusInfeasible:
            return "infeasible", inf
        model: Any = self.problem.solverModel
        info = model.getInfo()
        num_iterations = max(info.simplex_iteration_count, 0)
        self.clock.spend(_BUILT_VARIABLE * size + iteration * num_iterations)
        scaled = info.mip_dual_bound - ROUNDING
        return "open", scaled / self.scale + self.graph.constant

    def _size_of_costs(self) -> float:
        if self.known_cost < inf:
            size = self.known_cost - self.graph.constant
        else:
            usable = [n.costs[np.isfinite(n.costs)] for n in self.graph.nodes]
            size = sum(float(costs.sum()) / max(costs.size, 1) for costs in usable)
        return max(size, 1e-9 * abs(self.graph.constant), 1e-250)

    def _add_choice(self, node: int) -> list[pulp.LpVariable]:
        costs = self.graph.nodes[node].costs
        usable = np.isfinite(costs)
        variables = [
            pulp.LpVariable(f"x_{node}_{choice}", 0, int(is_usable), pulp.LpInteger)
            for choice, is_usable in enumerate(usable)
        ]
        self.problem += pulp.lpSum(variables) == 1
        return variables

    def _add_pairs(self, index: int) -> dict[tuple[int, int], pulp.LpVariable]:
        edge = self.graph.edges[index]
        pairs = {
            (int(a), int(b)): pulp.LpVariable(f"y_{index}_{a}_{b}", 0, 1)
            for a, b in np.argwhere(np.isfinite(edge.costs))
        }
        by_row = [[] for _ in range(edge.costs.shape[0])]
        by_column = [[] for _ in range(edge.costs.shape[1])]
        for (a, b), variable in pairs.items():
            by_row[a].append(variable)
            by_column[b].append(variable)
        sides = (
            (by_row, edge.first, edge.first_class),
            (by_column, edge.second, edge.second_class),
        )
        for sums, node, classes in sides:
            for number, variables in enumerate(sums):
                chosen = [self.x[node][c] for c in np.flatnonzero(classes == number)]
                self.problem += pulp.lpSum(variables) == pulp.lpSum(chosen)
        return pairs

    def _objective(self) -> pulp.LpAffineExpression:
        terms = [
            (variable, cost * self.scale)
            for node, variables in zip(self.graph.nodes, self.x, strict=True)
            for variable, cost in zip(variables, node.costs.tolist(), strict=True)
            if 0 < cost < inf
        ]
        for edge, pairs in zip(self.graph.edges, self.y, strict=True):
            terms += [
                (variable, float(edge.costs[pair]) * self.scale)
                for pair, variable in pairs.items()
                if edge.costs[pair]
            ]
        return pulp.LpAffineExpression(terms)

    def _add_cutoff(self, objective: pulp.LpAffineExpression) -> None:
        most = (self.cutoff - self.graph.constant) * self.scale
        self.problem += objective.copy() <= most + ROUNDING

    def _add_memory(self, live: int) -> None:
        assert self.graph.budget is not None, "memory rows come from a budget"
        self.rows.add(live)
        limit = allowed(self.graph.budget)
        terms = [
            (variable, held * BYTES_SCALE / limit)
            for v in self.graph.live_sets[live]
            for variable, held in zip(
                self.x[v], self.graph.nodes[v].bytes.tolist(), strict=True
            )
            if held
        ]
        self.problem += pulp.LpAffineExpression(terms) <= BYTES_SCALE

    def _broken_live_sets(self, choices: Sequence[int]) -> list[int]:
        if self.graph.budget is None:
            return []
        used = self.graph.used_bytes(choices)
        broken = np.flatnonzero(used > allowed(self.graph.budget))
        worst = broken[np.argsort(-used[broken], kind="stable")]
        return [int(live) for live in worst[:MOST_ROWS_AT_ONCE]]

    def _found_choices(self) -> tuple[int, ...] | None:
        values = [[variable.varValue or 0.0 for variable in node] for node in self.x]
        if any(max(node) < 0.99 for node in values):
            return None
        choices = tuple(int(np.argmax(node)) for node in values)
        return choices if self.graph.cost(choices) < inf else None
