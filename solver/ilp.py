"""What reduction and messages leave over, as an integer linear program.

Variables: x[v, c] in {0, 1} for choice c of node v; y[e, a, b] in [0, 1] for a pair of
classes of edge e, absent where the pair is forbidden.

    minimise    sum costs_v[c] x[v, c] + sum costs_e[a, b] y[e, a, b]   (_objective)
    subject to  sum_c x[v, c] = 1                                       (_add_choice)
                sum_b y[e, a, b] = sum_{c in a} x[first, c]             (_add_pairs)
                sum_a y[e, a, b] = sum_{c in b} x[second, c]            (_add_pairs)
                the objective <= cutoff, where there is one             (_add_cutoff)

The cutoff is a row, as HiGHS takes plans above its own `objective_bound` for optimal.
PuLP builds the program; HiGHS runs it, and is asked what it found.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import highspy
import numpy as np
import pulp

from .checks import Checks, seconds_of_check
from .choice_graph import ChoiceGraph
from .clock import Clock

MOST_PAIRS = 100_000
COST_SCALE = 1e4
# HiGHS solves its linear programs to 1e-7 a variable.
ROUNDING = 1e-8 * COST_SCALE
ITERATIONS_OF_NODE = 30
_INFEASIBLE = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)
# Seconds of a usual core: of an iteration, its part for each variable, and of building.
_ITERATION, _ITERATION_OF_VARIABLE, _BUILT_VARIABLE = 2e-5, 4e-8, 3e-5


@dataclass(frozen=True)
class IlpResult:
    """`bound` is below every assignment, inf when there is none.

    With a cutoff it is at most that.

    `choices` is a plan, or None if the work was up before one was found.
    """

    bound: float
    choices: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"IlpResult: bound {self.bound:.6g}"


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
    cost: float = inf,
    cutoff: float = inf,
) -> IlpResult:
    """Solves a graph to a relative gap, or as far as the work goes.

    Args:
        graph: the graph.
        gap: wanted (cost - bound) / cost.
        work_limit: seconds of work.
        clock: what is told of the work.
        cost: the cost of a plan already known, which says what a gap is relative to.
        cutoff: plans that cost as much or more are not looked for.
    """
    clock = clock or Clock()
    if work_limit <= 0 or clock.is_late:
        return IlpResult(-inf, None)
    return _Program(graph, cost, clock, cutoff).run(gap, work_limit)


class _Program:
    def __init__(
        self, graph: ChoiceGraph, cost: float, clock: Clock, cutoff: float
    ) -> None:
        self.graph, self.clock, self.cutoff = graph, clock, cutoff
        self.known_cost = cost
        self.scale = COST_SCALE / self._size_of_costs()
        self.problem = pulp.LpProblem("assignment", pulp.LpMinimize)
        self.x = [self._add_choice(v) for v in range(len(graph.nodes))]
        self.y = [self._add_pairs(e) for e in range(len(graph.edges))]
        objective = self._objective()
        self.problem.setObjective(objective)
        if cutoff < inf:
            self._add_cutoff(objective)

    def run(self, gap: float, seconds: float) -> IlpResult:
        """Solves the program to a gap, in so many seconds of work."""
        target = gap * abs(self.known_cost)
        bound = self._solve(target / 2 if target < inf else 0.0, gap / 2, seconds)
        if bound == inf:
            return IlpResult(self.cutoff, None)
        found = self._found_choices()
        cost = inf if found is None else self.graph.cost(found)
        return IlpResult(min(bound, cost, self.cutoff), found)

    def _solve(self, gap_abs: float, gap: float, seconds: float) -> float:
        """A bound on the plans below the cutoff, inf where there are none."""
        size = sum(map(len, self.x)) + sum(map(len, self.y))
        iteration = _ITERATION + _ITERATION_OF_VARIABLE * size
        time_left = self.clock.time_left
        solver = pulp.HiGHS(
            msg=False,
            timeLimit=None if time_left == inf else time_left,
            parallel="off",
            mip_max_nodes=max(int(seconds / (iteration * ITERATIONS_OF_NODE)), 1),
            gapAbs=gap_abs * self.scale,
            gapRel=gap if gap_abs == 0 else 0.0,
            mip_feasibility_tolerance=1e-9,
            primal_feasibility_tolerance=1e-9,
        )
        solver.createAndConfigureSolver(self.problem)
        solver.buildSolverModel(self.problem)
        model: Any = self.problem.solverModel
        Checks(model, seconds / seconds_of_check(size))
        model.run()
        if model.getModelStatus() in _INFEASIBLE:
            return inf
        self.solution = model.getSolution()
        info = model.getInfo()
        num_iterations = max(info.simplex_iteration_count, 0)
        self.clock.spend(_BUILT_VARIABLE * size + iteration * num_iterations)
        scaled = info.mip_dual_bound - ROUNDING
        return scaled / self.scale + self.graph.constant

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
                terms = [(y, 1) for y in variables] + [(x, -1) for x in chosen]
                self.problem += pulp.LpAffineExpression(terms) == 0
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

    def _found_choices(self) -> tuple[int, ...] | None:
        if self.x and not self.solution.value_valid:
            return None
        names = (variable.name for variable in self.problem.variables())
        found = dict(zip(names, self.solution.col_value, strict=True))
        values = [[found[variable.name] for variable in node] for node in self.x]
        if any(max(node) < 0.99 for node in values):
            return None
        choices = tuple(int(np.argmax(node)) for node in values)
        return choices if self.graph.cost(choices) < inf else None
