"""A plan mixed from plans: clusters of nodes that each follow one of them.

Where prices on memory are best, several plans are equally good, and between them those
within the budget: some layers follow the one, some the other. So

    clusters   nodes that the plans decide differently, joined along the edges where it
               costs most to follow two plans, up to a size (`_clusters`; Kruskal 1956)
    contract   a cluster is a node whose choices are the plans; edges and rows of memory
               are summed (`_contracted`)
    relax      its linear program with every row says what rows are worth (`Shares`)
    round      few clusters share several plans, and with a little less budget these can
               be rounded while the others stay (`_rounded`)
    branch     else the integer program of all mixtures, with every row, is small, and
               HiGHS may check its limits so often; as long as prices find other plans
               to mix, a rounded mixture is enough

Costs and rows are exact, so that a mixture is a plan like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from .choice_graph import ChoiceGraph, Edge, Node
from .clock import Clock
from .memory_rows import MemoryRow
from .relaxation import Relaxation
from .whole import solve_whole

FEWEST_PARTS = 128  # that all nodes with a choice are cut into, or more
MOST_TREE_NODES = 20
MOST_CHECKS, FEW_CHECKS = 150, 60  # of a tree of all mixtures; few if one is known
ROUNDING = 1e-9
SLACKS = 0.004, 0.016  # of the budget, left for rounding
LEAST_SHARE = 1e-7


def mix(
    graph: ChoiceGraph,
    rows: Sequence[MemoryRow],
    budget: float,
    plans: Sequence[Sequence[int]],
    *,
    gap: float,
    cost: float = inf,
    clock: Clock | None = None,
) -> tuple[int, ...] | None:
    """The cheapest mixture of some plans that no row puts above the budget.

    Args:
        graph: the problem; its budget is not looked at.
        rows: all that is said about memory.
        budget: what each row may come to.
        plans: allowed ones, within budget or not.
        gap: relative distance from the best mixture at which to stop.
        cost: of a plan that is known; None is returned where no mixture is cheaper.
        clock: what is told of the work.
    """
    mixtures = Mixtures(graph, rows, plans, clock)
    return mixtures.cheapest(budget, gap=gap, cost=cost)


@dataclass(frozen=True, eq=False)
class Shares:
    """Plans that each have a share of every cluster, so that the rows are kept to.

    `value` is the least that it costs: an estimate of the cheapest plan within the
    rows, neither above it nor below. `prices` [rows] are the duals, per byte: far
    better prices than whole plans tell, as each cluster has shares of its own.
    """

    value: float
    prices: np.ndarray

    def __str__(self) -> str:
        return f"Shares: value {self.value:.6g}, {np.count_nonzero(self.prices)} prices"


class Mixtures:
    """All mixtures of some plans, for one budget after the other."""

    def __init__(
        self,
        graph: ChoiceGraph,
        rows: Sequence[MemoryRow],
        plans: Sequence[Sequence[int]],
        clock: Clock | None = None,
    ) -> None:
        self.graph, self.clock = graph, clock
        table = np.unique(np.array(plans, np.intp), axis=0)
        self._clusters = _Mixture(graph, table) if len(table) > 1 else None
        self._rows = [self._clusters.row(row) for row in rows] if self._clusters else []

    def shares(self, budget: float) -> Shares | None:
        """The best shares, or None if no shares keep to the budget."""
        found = self._relaxation(budget, inf)
        if found is None:
            return None
        relaxation, within = found
        relaxed = relaxation.solve(relaxation.domain)
        if relaxed is None or relaxed.value == inf:
            return None
        prices = np.zeros(len(self._rows))
        prices[within] = relaxed.prices
        return Shares(relaxed.value, prices)

    def cheapest(
        self,
        budget: float,
        *,
        gap: float,
        cost: float = inf,
        enough: float = -inf,
        rounds_only: bool = False,
        most_checks: int = MOST_CHECKS,
    ) -> tuple[int, ...] | None:
        """As `mix`; one that costs no more than is `enough` ends the search.

        `rounds_only`: a mixture that was rounded ends it too. `most_checks` of a tree.
        """
        rounded = self._rounded(budget, max(gap, ROUNDING), enough)
        best = inf if rounded is None else self.graph.cost(rounded)
        if rounded is not None and (best <= enough or rounds_only):
            return rounded if best < cost else None
        found = self._relaxation(budget, cost)
        if found is None or self._clusters is None:
            return None
        relaxation = found[0]
        most = most_checks if rounded is None else FEW_CHECKS
        choices = _whole(relaxation, gap, enough, most)
        if choices is None or not relaxation.graph.cost(choices) < min(cost, best):
            return rounded if best < cost else None
        return self._clusters.expand(choices)

    def _rounded(
        self, budget: float, gap: float, enough: float
    ) -> tuple[int, ...] | None:
        """The best shares of a little less budget, rounded within all of it."""
        found = self._relaxation(budget, inf)
        if found is None or self._clusters is None:
            return None
        best, least, relaxation = None, inf, found[0]
        for slack in SLACKS:
            relaxation.allow((1 - slack) * relaxation.budget)
            relaxed = relaxation.solve(relaxation.domain)
            if relaxed is None or relaxed.value == inf:
                break
            few = relaxation.among(relaxed.shares > LEAST_SHARE)
            choices = _whole(few, gap, enough)
            if choices is not None and few.graph.cost(choices) < least:
                least = few.graph.cost(choices)
                best = self._clusters.expand(choices)
            if least <= enough:
                break
        return best

    def _relaxation(
        self, budget: float, cost: float
    ) -> tuple[Relaxation, list[int]] | None:
        """The program of all mixtures, and the rows that are part of it."""
        if self._clusters is None:
            return None
        within = [r for r, row in enumerate(self._rows) if _most(row) > budget]
        if any(not self._rows[r].nodes for r in within):
            return None  # no plan changes what is too much
        contracted = self._clusters.graph([self._rows[r] for r in within])
        relaxation = Relaxation(
            contracted,
            np.ones(contracted.num_choices, bool),
            budget * (1 - ROUNDING),
            size=float(min(self._clusters.costs.min(), cost)),
            clock=self.clock,
        )
        for r in within:
            relaxation.add_row(self._rows[r])
        return relaxation, within


def _whole(
    relaxation: Relaxation, gap: float, enough: float, most_checks: float = inf
) -> tuple[int, ...] | None:
    """Without presolve, which never ended on some mixtures."""
    found = solve_whole(
        relaxation,
        gap=gap,
        most_nodes=MOST_TREE_NODES,
        most_checks=most_checks,
        enough=enough,
        presolves=False,
    )
    return found.choices


class _Mixture:
    """`cluster` [nodes] is -1 where all plans agree; `table` [plans, nodes]."""

    def __init__(self, graph: ChoiceGraph, table: np.ndarray) -> None:
        self.whole, self.table = graph, table
        self.costs = np.array([graph.cost(plan) for plan in table])
        differs = (table != table[0]).any(axis=0)
        types = graph.types
        self._used = np.flatnonzero(differs[types.first] | differs[types.second])
        self._first, self._second = types.first[self._used], types.second[self._used]
        self._between = _edge_costs(graph, table, self._used)
        self.cluster = _clusters(
            differs, self._first, self._second, _mismatch(self._between)
        )
        self.count = int(self.cluster.max(initial=-1)) + 1

    def graph(self, rows: Sequence[MemoryRow]) -> ChoiceGraph:
        """Clusters as nodes, plans as choices, the most of their rows as bytes."""
        plans = len(self.table)
        first, second = self.cluster[self._first], self.cluster[self._second]
        own = np.zeros((self.count, plans))
        members = np.flatnonzero(self.cluster >= 0)
        chosen = _node_costs(self.whole, self.table)[:, members]
        np.add.at(own, self.cluster[members], chosen.T)
        is_inside = (first < 0) | (second < 0) | (first == second)
        along = np.einsum("epp->ep", self._between)[is_inside]
        np.add.at(own, np.maximum(first, second)[is_inside], along)
        across = ~is_inside
        low, high = np.minimum(first, second), np.maximum(first, second)
        matrices = np.where(
            (first < second)[:, None, None],
            self._between,
            self._between.transpose(0, 2, 1),
        )[across]
        ends, number = np.unique(
            low[across] * self.count + high[across], return_inverse=True
        )
        between = np.zeros((len(ends), plans, plans))
        np.add.at(between, number.reshape(-1), matrices)
        each = np.arange(plans)
        edges = [
            Edge(int(both // self.count), int(both % self.count), each, each, matrix)
            for both, matrix in zip(ends, between, strict=True)
        ]
        held = np.zeros((self.count, plans))
        for row in rows:
            held[row.index] = np.maximum(held[row.index], row.weights)
        pairs = enumerate(zip(own, held, strict=True))
        nodes = [Node(f"cluster {k}", costs, most) for k, (costs, most) in pairs]
        bare = ChoiceGraph(tuple(nodes), tuple(edges))
        constant = self.costs[0] - bare.cost([0] * self.count)
        return ChoiceGraph(bare.nodes, bare.edges, constant=float(constant))

    def row(self, row: MemoryRow) -> MemoryRow:
        """What clusters hold by a row of the whole graph."""
        cluster = self.cluster[row.index]
        held = np.stack([row.held(plan) for plan in self.table], axis=1)
        weights = np.zeros((self.count, len(self.table)))
        np.add.at(weights, cluster[cluster >= 0], held[cluster >= 0])
        least = weights.min(axis=1)
        weights -= least[:, None]
        constant = row.constant + held[cluster < 0, 0].sum() + least.sum()
        nodes = np.flatnonzero(weights.any(axis=1)).tolist()
        return MemoryRow(tuple(nodes), tuple(weights[nodes]), float(constant))

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The plan of the whole graph."""
        followed = np.array([*choices, 0])[self.cluster]  # -1 is the last: any plan
        return tuple(self.table[followed, np.arange(followed.size)].tolist())


def _most(row: MemoryRow) -> float:
    return row.constant + sum(float(held.max()) for held in row.weights)


def _node_costs(graph: ChoiceGraph, table: np.ndarray) -> np.ndarray:
    """[plans, nodes] of choices [plans, nodes]."""
    types = graph.types
    each = [graph.nodes[index].costs for index in types.node_of.tolist()]
    starts = np.cumsum([0, *(costs.size for costs in each)], dtype=np.intp)
    return np.concatenate(each)[starts[types.node] + table]


def _edge_costs(graph: ChoiceGraph, table: np.ndarray, used: np.ndarray) -> np.ndarray:
    """[used, plans, plans] what edges cost if their ends follow two plans."""
    types, plans = graph.types, len(table)
    found = np.zeros((used.size, plans, plans))
    order = np.argsort(types.edge[used], kind="stable")
    kinds, starts = np.unique(types.edge[used][order], return_index=True)
    for kind, members in zip(kinds, np.split(order, starts[1:]), strict=False):
        edge = graph.edges[int(types.edge_of[kind])]
        rows = edge.first_class[table[:, types.first[used[members]]]]
        columns = edge.second_class[table[:, types.second[used[members]]]]
        costs = edge.costs[rows[:, None, :], columns[None, :, :]]
        found[members] = costs.transpose(2, 0, 1)
    return found


def _mismatch(between: np.ndarray) -> np.ndarray:
    """[edges] the most that two plans at its ends cost beyond one at both."""
    same = np.einsum("epp->ep", between)
    apart = between + between.transpose(0, 2, 1) - same[:, :, None] - same[:, None, :]
    return apart.reshape(len(between), -1).max(axis=1, initial=0.0)


def _clusters(
    differs: np.ndarray, first: np.ndarray, second: np.ndarray, apart: np.ndarray
) -> np.ndarray:
    """[nodes] the cluster of each node that `differs`, -1 of the others.

    Edges `first` to `second` are joined where `apart` is largest.
    """
    members = np.flatnonzero(differs)
    most = ceil(members.size / FEWEST_PARTS)
    parent, size = list(range(differs.size)), [1] * differs.size

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    is_wanted = differs[first] & differs[second] & (apart > 0)
    order = np.argsort(-apart[is_wanted], kind="stable")
    ends = first[is_wanted][order].tolist(), second[is_wanted][order].tolist()
    for one, other in zip(*ends, strict=True):
        low, high = root(one), root(other)
        if low != high and size[low] + size[high] <= most:
            parent[high], size[low] = low, size[low] + size[high]
    found = np.full(differs.size, -1)
    roots = [root(node) for node in members.tolist()]
    found[members] = np.unique(roots, return_inverse=True)[1].reshape(-1)
    return found
