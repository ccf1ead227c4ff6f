"""Mixtures of plans within rows: some layers follow the one, some the other.

    clusters   nodes that the plans decide differently, joined along the edges where it
               costs most to follow two plans, up to a size (Kruskal 1956)
    contract   a cluster chooses a plan; costs and rows are summed, exactly
    relax      the linear program of all mixtures, with every row
    round      the integer program of the few mixtures that relaxations with a little
               less budget are made of

What rows lack is allowed at a high price, so that there always is a mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import highspy
import networkx as nx
import numpy as np

from .budget_constraints import BudgetRow, edge_classes
from .checks import Checks
from .choice_graph import ChoiceGraph

MOST_PARTS = 128
COST_SCALE = 1e4
MOST_PIVOTS, MOST_TREE_NODES, MOST_CHECKS = 60_000, 50, 60
TIGHTENED = 0.004, 0.016  # of the unit of bytes
LEAST_SHARE = 1e-7
LARGE = 1e200  # a forbidden pair


@dataclass(frozen=True, eq=False)
class _Sum:
    """A row on clusters: `own` [clusters, plans], `pairs` [k, plans, plans] by key."""

    constant: float
    own: np.ndarray
    keys: np.ndarray
    pairs: np.ndarray


class Mixtures:
    """All mixtures of `plans` [plans, nodes], that cost what the row `cost` says.

    Without `has_costs` it only says what is forbidden, and which nodes stay together.

    Costs are about `size`, bytes about `unit`; a unit of bytes that rows lack costs
    `lacking` times the size.
    """

    def __init__(
        self,
        graph: ChoiceGraph,
        cost: BudgetRow,
        rows: Sequence[BudgetRow],
        plans: np.ndarray,
        *,
        has_costs: bool,
        size: float,
        unit: float,
        lacking: float,
    ) -> None:
        self.table, self.unit = plans, unit
        self.scale, self.lacking = COST_SCALE / size, lacking
        self._ends, self._classes = graph.types, edge_classes(graph)
        self.cluster = self._clusters(cost)
        self.count = int(self.cluster.max(initial=-1)) + 1
        base = self._sum(cost)
        self.is_first = self._first_of_each() & np.isfinite(base.own)
        base = replace(base, own=np.where(self.is_first, base.own, 0.0))
        self._cost = base if has_costs else _without(base)
        self._rows = [self._sum(row) for row in rows]
        self._program, self._num_fixed = self._build()
        self._model = self._run(self._program)

    def rounded(self, limits: np.ndarray, gap: float) -> tuple[int, ...]:
        """A plan that lacks little of the limits [rows], if any; the first at worst."""
        support = self._support(limits)
        for part in TIGHTENED:
            support |= self._support(limits - part * self.unit)
        support[:, 0] = True
        model = self._run(self._program, support, gap)
        self._limit(model, limits)
        Checks(model, MOST_CHECKS)
        model.run()
        values = np.array(model.getSolution().col_value)
        if values.size < support.size:
            return tuple(self.table[0].tolist())
        followed = values[: support.size].reshape(support.shape).argmax(axis=1)
        return self.expand(followed)

    def _support(self, limits: np.ndarray) -> np.ndarray:
        """Bool [clusters, plans] that have a share in the linear program."""
        self._limit(self._model, limits)
        self._model.run()
        values = np.array(self._model.getSolution().col_value)
        shares = values[: self.is_first.size].reshape(self.is_first.shape)
        return shares > LEAST_SHARE

    def expand(self, followed: np.ndarray) -> tuple[int, ...]:
        """The plan of the whole graph in which each cluster follows one."""
        plan = np.append(followed, 0)[self.cluster]  # -1 is the last: any plan
        return tuple(self.table[plan, np.arange(plan.size)].tolist())

    def _clusters(self, cost: BudgetRow) -> np.ndarray:
        """[nodes] the cluster of each node that plans differ at, -1 of the others."""
        differs = (self.table != self.table[0]).any(axis=0)
        first, second = self._ends.first, self._ends.second
        inner = np.flatnonzero(differs[first] & differs[second])
        a, b = self._classes.at(self.table, inner)
        between = np.minimum(cost.at_edges(a[:, None], b[None], inner), LARGE)
        same = np.einsum("ppe->pe", between)
        apart = between + between.transpose(1, 0, 2) - same[:, None] - same[None]
        apart = apart.max(axis=(0, 1), initial=0.0)
        order = np.argsort(-apart, kind="stable")
        order = order[apart[order] > 0]
        ends = first[inner[order]], second[inner[order]]
        return _joined(differs, *ends, most=ceil(differs.sum() / MOST_PARTS))

    def _first_of_each(self) -> np.ndarray:
        """Bool [clusters, plans]: the first plan of those alike in a cluster."""
        order = np.argsort(self.cluster, kind="stable")
        ends = np.searchsorted(self.cluster[order], np.arange(self.count + 1))
        is_first = np.zeros((self.count, len(self.table)), bool)
        for number, (low, high) in enumerate(zip(ends, ends[1:], strict=False)):
            own = self.table[:, order[low:high]]
            is_first[number, np.unique(own, axis=0, return_index=True)[1]] = True
        return is_first

    def _sum(self, row: BudgetRow) -> _Sum:
        plans = len(self.table)
        own, held = np.zeros((self.count, plans)), row.at_nodes(self.table)
        cluster = self.cluster[row.nodes]
        np.add.at(own, cluster[cluster >= 0], held[:, cluster >= 0].T)
        constant = row.constant + float(held[0, cluster < 0].sum())
        first = self.cluster[self._ends.first[row.edges]]
        second = self.cluster[self._ends.second[row.edges]]
        a, b = self._classes.at(self.table, row.edges)
        low, high = np.minimum(first, second), np.maximum(first, second)
        along = row.at_edges(a, b)
        constant += float(along[0, high < 0].sum())
        inside = (high >= 0) & ((low < 0) | (low == high))
        np.add.at(own, high[inside], along[:, inside].T)
        across = np.flatnonzero((low >= 0) & (low != high))
        pairs = row.at_edges(a[:, None, across], b[None, :, across], across)
        pairs = np.where(first[across] < second[across], pairs, pairs.swapaxes(0, 1))
        ends = low[across] * self.count + high[across]
        keys, number = np.unique(ends, return_inverse=True)
        between = np.zeros((len(keys), plans, plans))
        np.add.at(between, number.reshape(-1), pairs.transpose(2, 0, 1))
        return _Sum(constant, own, keys, between)

    def _build(self) -> tuple[Any, int]:
        """Columns: clusters' plans, pairs of them, what is lacking."""
        plans, cost = len(self.table), self._cost
        first, second = np.divmod(cost.keys, max(self.count, 1))
        usable = self.is_first[first][:, :, None] & self.is_first[second][:, None, :]
        k, p, q = np.nonzero(usable & np.isfinite(cost.pairs))
        x = np.arange(self.count * plans).reshape(self.count, plans)
        y = x.size + np.arange(k.size)
        place = np.full(cost.pairs.shape, -1)
        place[k, p, q] = y
        lacking = x.size + y.size
        sides = self.count + np.arange(len(cost.keys) * 2 * plans).reshape(-1, 2, plans)
        one = np.ones
        triples = [
            (np.repeat(np.arange(self.count), plans), x.reshape(-1), one(x.size)),
            (sides[k, 0, p], y, one(y.size)),
            (sides[k, 1, q], y, one(y.size)),
            (sides[:, 0].reshape(-1), x[first].reshape(-1), -one(first.size * plans)),
            (sides[:, 1].reshape(-1), x[second].reshape(-1), -one(first.size * plans)),
        ]
        fixed = self.count + sides.size
        for number, row in enumerate(self._rows, fixed):
            at = np.searchsorted(cost.keys, row.keys)
            columns = np.concatenate([x.reshape(-1), place[at].reshape(-1), [lacking]])
            held = [row.own.reshape(-1), row.pairs.reshape(-1), [-self.unit]]
            values = np.concatenate(held) / self.unit
            kept = (columns >= 0) & (values != 0)
            rows = np.full(int(kept.sum()), number)
            triples.append((rows, columns[kept], values[kept]))
        costs = np.concatenate([cost.own.reshape(-1), cost.pairs[k, p, q]]) * self.scale
        costs = np.append(costs, self.lacking * COST_SCALE)
        upper = np.full(costs.size, inf)
        upper[: x.size][~self.is_first.reshape(-1)] = 0.0
        limits = np.concatenate([one(self.count), np.zeros(sides.size)])
        return _program(costs, upper, limits, len(self._rows), triples), fixed

    def _run(
        self, program: Any, support: np.ndarray | None = None, gap: float = 0.0
    ) -> Any:
        """HiGHS with the program, an integer one of what is in a support."""
        model = highspy.Highs()
        for name, value in _OPTIONS.items():
            model.setOptionValue(name, value)
        model.passModel(program)
        if support is not None:
            model.setOptionValue("solver", "choose")
            model.setOptionValue("mip_rel_gap", gap)
            model.setOptionValue("mip_max_nodes", MOST_TREE_NODES)
            index = np.arange(support.size, dtype=np.int32)
            whole = np.full(index.size, highspy.HighsVarType.kInteger)
            model.changeColsIntegrality(index.size, index, whole)
            upper = np.where(support & self.is_first, 1.0, 0.0).reshape(-1)
            model.changeColsBounds(index.size, index, np.zeros(index.size), upper)
        return model

    def _limit(self, model: Any, limits: np.ndarray) -> None:
        pairs = zip(self._rows, limits.tolist(), strict=True)
        for number, (row, limit) in enumerate(pairs, self._num_fixed):
            model.changeRowBounds(number, -inf, (limit - row.constant) / self.unit)


def _without(base: _Sum) -> _Sum:
    """Only what is forbidden."""
    pairs = np.where(np.isfinite(base.pairs), 0.0, inf)
    return _Sum(0.0, np.zeros_like(base.own), base.keys, pairs)


def _joined(
    differs: np.ndarray, first: np.ndarray, second: np.ndarray, most: int
) -> np.ndarray:
    """Clusters of at most so many nodes, joined along edges in this order."""
    members = np.flatnonzero(differs)
    joined = nx.utils.UnionFind(members.tolist())
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        low, high = joined[one], joined[other]
        if low != high and joined.weights[low] + joined.weights[high] <= most:
            joined.union(low, high)
    found = np.full(differs.size, -1)
    roots = [joined[node] for node in members.tolist()]
    found[members] = np.unique(roots, return_inverse=True)[1].reshape(-1)
    return found


def _program(
    costs: np.ndarray,
    upper: np.ndarray,
    limits: np.ndarray,
    num_rows: int,
    triples: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> Any:
    """Equal to `limits`, with rows below them that have none yet."""
    rows, columns, values = (
        np.concatenate(each) for each in zip(*triples, strict=True)
    )
    order = np.lexsort((rows, columns))
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = costs.size, limits.size + num_rows
    program.col_cost_ = costs
    program.col_lower_, program.col_upper_ = np.zeros(costs.size), upper
    program.row_lower_ = np.append(limits, np.full(num_rows, -inf))
    program.row_upper_ = np.append(limits, np.full(num_rows, inf))
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    starts = np.searchsorted(columns[order], np.arange(costs.size + 1))
    matrix.start_, matrix.index_ = starts.astype(np.int32), rows[order].astype(np.int32)
    matrix.value_ = values[order]
    return program


_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "solver": "simplex",
    "simplex_iteration_limit": MOST_PIVOTS,
    "random_seed": 0,
    "primal_feasibility_tolerance": 1e-9,
    "mip_feasibility_tolerance": 1e-9,
}
