"""The linear relaxation of a choice graph with rows of memory, solved again and again.

Variables: x[v, c] in [0, 1] for choice c of node v; y[e, a, b] >= 0 for a pair of
classes of edge e, absent where the pair is forbidden; t >= 0, the peak.

    minimise    sum costs_v[c] x[v, c] + sum costs_e[a, b] y[e, a, b]    or  t
    subject to  sum_c x[v, c] = 1                                  (_add_choices)
                sum_b y[e, a, b] = sum_{c in a} x[first, c]        (_add_pairs)
                sum_a y[e, a, b] = sum_{c in b} x[second, c]       (_add_pairs)
                constant + sum weights_v[c] x[v, c] <= budget or t      (add_row)

Without rows it is as tight as messages get; with rows its value is that of the best
prices on memory (their Lagrangian dual), and the duals of the rows are those prices.
The dual simplex method goes on from the last solution when choices are forbidden or
rows come, which takes few pivots.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import highspy
import numpy as np

from .choice_graph import ChoiceGraph
from .clock import Clock
from .memory_rows import MemoryRow

MOST_PIVOTS = 60_000  # of one solve
# HiGHS solves to 1e-7 a row: values are taken this part of the costs' size lower.
ROUNDING = 1e-8
COST_SCALE = 1e4
# Seconds of a usual core: of a pivot, its part for each variable, and of building one.
_PIVOT, _PIVOT_OF_VARIABLE, _BUILT_VARIABLE = 2e-5, 1e-8, 2e-6


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution: its value (inf if there is none), shares and what others would cost.

    `shares` [choices] and `excess` [choices] run over the choices of all nodes: how
    much of each is chosen, and by how much more a solution that makes it would cost at
    least. `prices` [rows] are the duals of the rows, per byte.
    """

    value: float
    shares: np.ndarray
    excess: np.ndarray
    prices: np.ndarray

    def __str__(self) -> str:
        return f"Relaxed: value {self.value:.6g}, {len(self.prices)} rows"


class Relaxation:
    """One linear program, kept between solves.

    Choices outside of `domain` (bool [choices]) are no part of it. `minimises_peak`:
    the objective is t and there is no budget. `size` is about what an assignment costs.
    `clock` is told of the work.
    """

    def __init__(
        self,
        graph: ChoiceGraph,
        domain: np.ndarray,
        budget: float,
        *,
        size: float,
        minimises_peak: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.graph, self.budget, self.clock = graph, budget, clock or Clock()
        self.minimises_peak = minimises_peak
        self.starts = graph.starts
        self.domain = domain & np.isfinite(graph.flat_costs)
        self.scale = COST_SCALE / max(size, 1e-250)
        self.rows: list[MemoryRow] = []
        self.num_pivots = 0
        self.columns = np.flatnonzero(self.domain)
        self._column_of = np.full(self.domain.size, -1)
        self._column_of[self.columns] = np.arange(self.columns.size)
        self._is_open = np.ones(self.columns.size, bool)
        self.model = self._build()

    def add_row(self, row: MemoryRow) -> None:
        """Adds a row of memory, on the same nodes."""
        self.rows.append(row)
        columns, values = [], []
        for node, weights in zip(row.nodes, row.weights, strict=True):
            own = self._column_of[self.starts[node] : self.starts[node + 1]]
            chosen = (own >= 0) & (weights != 0)
            columns.append(own[chosen])
            values.append(weights[chosen])
        unit, limit = self._unit, self.budget - row.constant
        if self.minimises_peak:
            columns.append(np.array([self.columns.size]))
            values.append(np.array([-unit]))
            limit = -row.constant
        index = np.concatenate([*columns, np.zeros(0)]).astype(np.int32)
        value = np.concatenate([*values, np.zeros(0)]) / unit
        self.model.addRow(-inf, limit / unit, index.size, index, value)

    def among(self, domain: np.ndarray) -> "Relaxation":
        """The program of a smaller domain (bool [choices]), with the same rows."""
        few = Relaxation(
            self.graph,
            self.domain & domain,
            self.budget,
            size=COST_SCALE / self.scale,
            minimises_peak=self.minimises_peak,
            clock=self.clock,
        )
        for row in self.rows:
            few.add_row(row)
        return few

    def value(self, objective: float) -> float:
        """What value an objective of the program is."""
        constant = 0.0 if self.minimises_peak else self.graph.constant
        return objective / self.scale + constant

    def open(self, domain: np.ndarray) -> None:
        """Forbids all choices outside of a smaller domain (bool [choices])."""
        is_open = domain[self.columns]
        changed = np.flatnonzero(is_open != self._is_open).astype(np.int32)
        if changed.size:
            upper = np.where(is_open[changed], inf, 0.0)
            self.model.changeColsBounds(
                changed.size, changed, np.zeros(changed.size), upper
            )
            self._is_open = is_open

    def solve(self, domain: np.ndarray, enough: float = inf) -> Relaxed | None:
        """The least value within a smaller domain (bool [choices]).

        Once it is known to be at least `enough`, it is told to be that, of no shares.
        None if it took too many pivots.
        """
        self.open(domain)
        beyond = 2 * ROUNDING * COST_SCALE  # so that rounding ends nothing early
        self.model.setOptionValue(_ENOUGH, self.objective(enough) + beyond)
        self._run_surely()
        info = self.model.getInfo()
        status = self.model.getModelStatus()
        nothing = np.zeros(0)
        if status == highspy.HighsModelStatus.kInfeasible:
            return Relaxed(inf, nothing, nothing, nothing)
        if status == highspy.HighsModelStatus.kObjectiveBound:
            return Relaxed(enough, nothing, nothing, nothing)
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        return self._relaxed(info.objective_function_value)

    def allow(self, budget: float) -> None:
        """Another budget for the rows added so far; `budget` stays that of others."""
        for number, row in enumerate(self.rows, self._num_graph_rows):
            limit = (budget - row.constant) / self._unit
            self.model.changeRowBounds(number, -inf, limit)

    def _run_surely(self) -> None:
        """Solves it; where rounding stops the simplex method, less exactly, or anew.

        A solution that is a little outside of the tolerance has no status. One or two
        pivots with a wider one are enough then, and a new start for what is left.
        """
        self.run()
        for tolerance, is_anew in _RETRIES:
            if self.model.getModelStatus() != highspy.HighsModelStatus.kUnknown:
                break
            if is_anew:
                self.model.clearSolver()
            self.model.setOptionValue(_TOLERANCE, tolerance)
            self.run()
        self.model.setOptionValue(_TOLERANCE, _OPTIONS[_TOLERANCE])

    def run(self, times: float = 1.0) -> None:
        """Runs HiGHS; `times`: what a pivot takes beside the linear program's."""
        self.model.run()
        num_pivots = max(self.model.getInfo().simplex_iteration_count, 0)
        self.num_pivots += num_pivots
        each = _PIVOT + _PIVOT_OF_VARIABLE * self.num_variables
        self.clock.spend(times * each * (1 + num_pivots))

    def _relaxed(self, objective: float) -> Relaxed:
        solution = self.model.getSolution()
        count = self.columns.size
        shares, excess = np.zeros(self.domain.size), np.full(self.domain.size, inf)
        shares[self.columns] = np.array(solution.col_value)[:count]
        excess[self.columns] = np.array(solution.col_dual)[:count] / self.scale
        duals = np.array(solution.row_dual)[self._num_graph_rows :]
        value = self.value(objective - ROUNDING * COST_SCALE)
        prices = np.maximum(-duals, 0.0) / (self.scale * self._unit)
        return Relaxed(value, shares, np.maximum(excess, 0.0), prices)

    def objective(self, value: float) -> float:
        """What the program's objective is for a value."""
        if not self.minimises_peak:
            value -= self.graph.constant
        return value * self.scale

    @property
    def _unit(self) -> float:
        """Bytes in which rows are written."""
        if self.minimises_peak:
            return self._size_of_bytes
        return max(self.budget, 1e-250)

    def _build(self) -> Any:
        triples: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        costs = [self.graph.flat_costs[self.columns]]
        sizes = [float(n.bytes.max(initial=0.0)) for n in self.graph.nodes]
        self._size_of_bytes = max(sum(sizes), 1e-250)
        if self.minimises_peak:
            costs = [np.zeros(self.columns.size), np.array([self._size_of_bytes])]
        equal = self._add_choices(triples)
        self._add_pairs(triples, costs, equal)
        rows, columns, values = (
            np.concatenate(each) for each in zip(*triples, strict=True)
        )
        order = np.lexsort((rows, columns))
        all_costs = np.concatenate(costs)
        if self.minimises_peak:
            all_costs[self.columns.size + 1 :] = 0.0
            self.scale = COST_SCALE / self._size_of_bytes
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = all_costs.size, len(equal)
        self.num_variables = all_costs.size
        self.clock.spend(_BUILT_VARIABLE * all_costs.size)
        program.col_cost_ = all_costs * self.scale
        program.col_lower_ = np.zeros(all_costs.size)
        program.col_upper_ = np.full(all_costs.size, inf)
        program.row_lower_ = program.row_upper_ = np.array(equal, np.float64)
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        starts = np.searchsorted(columns[order], np.arange(all_costs.size + 1))
        matrix.start_ = starts.astype(np.int32)
        matrix.index_ = rows[order].astype(np.int32)
        matrix.value_ = values[order]
        self._num_graph_rows = len(equal)
        model = highspy.Highs()
        for name, value in _OPTIONS.items():
            model.setOptionValue(name, value)
        model.passModel(program)
        return model

    def _add_choices(
        self, triples: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    ) -> list[float]:
        node = np.repeat(np.arange(len(self.graph.nodes)), np.diff(self.starts))
        count = self.columns.size
        triples.append((node[self.columns], np.arange(count), np.ones(count)))
        return [1.0] * len(self.graph.nodes)

    def _add_pairs(
        self,
        triples: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        costs: list[np.ndarray],
        equal: list[float],
    ) -> None:
        num_columns = sum(each.size for each in costs)
        for edge in self.graph.edges:
            ends = ((edge.first, edge.first_class), (edge.second, edge.second_class))
            own = [
                self._column_of[self.starts[v] : self.starts[v + 1]] for v, _ in ends
            ]
            reached = [np.zeros(size, bool) for size in edge.costs.shape]
            for mask, (_, classes), column in zip(reached, ends, own, strict=True):
                mask[classes[column >= 0]] = True
            usable = np.isfinite(edge.costs) & reached[0][:, None] & reached[1][None, :]
            pairs = np.nonzero(usable)
            count = pairs[0].size
            index = np.arange(num_columns, num_columns + count)
            num_columns += count
            costs.append(edge.costs[pairs])
            for side, (_, classes) in enumerate(ends):
                row = len(equal)
                chosen = own[side] >= 0
                triples.append((row + pairs[side], index, np.ones(count)))
                triples.append(
                    (row + classes[chosen], own[side][chosen], -np.ones(chosen.sum()))
                )
                equal += [0.0] * edge.costs.shape[side]


def num_pairs(graph: ChoiceGraph, domain: np.ndarray) -> int:
    """How many pairs of classes the program of a domain would hold."""
    starts = graph.starts
    total = 0
    for edge in graph.edges:
        used = [
            np.unique(classes[domain[starts[v] : starts[v + 1]]]).size
            for v, classes in (
                (edge.first, edge.first_class),
                (edge.second, edge.second_class),
            )
        ]
        total += used[0] * used[1]
    return total


_ENOUGH = "objective_bound"
_TOLERANCE = "primal_feasibility_tolerance"
_RETRIES = (1e-8, False), (1e-7, False), (1e-7, True)
_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "solver": "simplex",
    "simplex_iteration_limit": MOST_PIVOTS,
    "random_seed": 0,
    _TOLERANCE: 1e-9,
}
