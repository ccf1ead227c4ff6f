"""Exact reduction: a smaller graph with the same optimum, and the way back.

Alternated to a fixpoint, driven by a queue of nodes whose surroundings changed:
    forbidden choices go (`_drop_forbidden`);
    dominated and duplicate choices go (`_drop_dominated`);
    row and column minima of an edge move into its nodes, equal rows and columns merge,
        an edge with nothing left to say goes (`_put_edge`);
    nodes with 0, 1 or 2 neighbours are minimised out (`_fold`), before anything else
        where that is little work.

Bytes and budgets are not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

import numpy as np

from . import min_plus
from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Edge, Infeasible, Node

MOST_FOLD_WORK = 60_000_000
FEW_FOLD_WORK = 300_000


_Sides = tuple[np.ndarray, np.ndarray, np.ndarray]  # classes at both ends, matrix


class _NormalEdge(NamedTuple):
    """Both ends' (classes, matrix), None without a matrix, and what moves into them."""

    here: tuple[np.ndarray, np.ndarray] | None
    there: tuple[np.ndarray, np.ndarray] | None
    costs: np.ndarray | None
    costs2: np.ndarray | None
    deviation: float


@dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced graph and the way back to the original.

    `slack` bounds the rounding: the original optimum is at least the reduced one less
    `slack`. `kept` are the original nodes that are left.
    """

    graph: ChoiceGraph
    slack: float
    kept: tuple[int, ...]
    num_original: int
    steps: tuple[Step, ...] = field(repr=False)

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The original assignment of the same cost."""
        return unfold_choices(self.steps, self.num_original, self.kept, choices)

    def __str__(self) -> str:
        return f"Reduced in {len(self.steps)} steps to {self.graph}"


def reduce(
    graph: ChoiceGraph,
    pool: ArrayPool | None = None,
    *,
    held: Collection[int] = (),
) -> Reduced:
    """Reduces a graph without changing its optimum.

    Args:
        graph: any valid graph.
        pool: shared arrays of earlier reductions of the same graph.
        held: nodes that keep all their choices, in place, so that they may have more
            edges than the graph has.

    Raises:
        Infeasible: some node has no choice left.
    """
    return _Reduction(graph, pool or ArrayPool(), held).run()


class _Reduction:
    """The working state: every array interned, edges stored from both ends.

    `halves[v][u]` is (classes of v, matrix [classes of v, classes of u]).
    """

    def __init__(
        self, graph: ChoiceGraph, pool: ArrayPool, held: Collection[int]
    ) -> None:
        self.graph, self.pool = graph, pool
        count = len(graph.nodes)
        self.costs = [pool.adopt(node.costs, np.float64) for node in graph.nodes]
        self.halves: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [
            {} for _ in range(count)
        ]
        self.constant, self.slack = graph.constant, 0.0
        self.steps: list[Step] = []
        self.is_folded = [False] * count
        self.is_held = [False] * count
        for node in held:
            self.is_held[node] = True
        self.queue = deque(range(count))
        self.is_queued = [True] * count

    def run(self) -> Reduced:
        known: dict[tuple[int, int, int], tuple[_Sides, _NormalEdge]] = {}
        for edge in self.graph.edges:
            key = id(edge.first_class), id(edge.second_class), id(edge.costs)
            if key not in known:
                sides = self._sides_of(edge)
                known[key] = sides, self._normal(*sides)
            sides, normal = known[key]
            if edge.second in self.halves[edge.first]:
                self._put_edge(edge.first, edge.second, *sides)
            else:
                self._put_normal(edge.first, edge.second, normal)
        few_first = sorted(self.queue, key=lambda v: len(self.halves[v]) > 2)
        self.queue = deque(few_first)
        while self.queue:
            node = self.queue.popleft()
            self.is_queued[node] = False
            if self.is_folded[node] or self.is_held[node]:
                continue
            if self._fold_work(node) > FEW_FOLD_WORK:
                self._drop_forbidden(node)
                self._drop_dominated(node)
            if self._fold_work(node) <= MOST_FOLD_WORK:
                self._fold(node)
        return self._result()

    def _sides_of(self, edge: Edge) -> _Sides:
        adopt = self.pool.adopt
        return self.pool.call(
            min_plus.used_only,
            adopt(edge.first_class, np.intp),
            adopt(edge.second_class, np.intp),
            adopt(edge.costs, np.float64),
        )

    def _costs_of(self, node: int) -> np.ndarray:
        """The costs of a node, interned only now that all moved into it."""
        self.costs[node] = self.pool.intern(self.costs[node])
        return self.costs[node]

    def _push(self, node: int) -> None:
        if not self.is_queued[node]:
            self.is_queued[node] = True
            if len(self.halves[node]) <= 2:
                self.queue.appendleft(node)
            else:
                self.queue.append(node)

    def _drop_forbidden(self, node: int) -> None:
        costs = self.costs[node]
        usable = np.flatnonzero(costs < inf)
        if not usable.size:
            raise self._infeasible(node)
        if usable.size < costs.size:
            self._keep(node, usable)
        least = self.costs[node].min()
        if least:
            self.constant += float(least)
            self.costs[node] = self.costs[node] - least

    def _infeasible(self, node: int) -> Infeasible:
        return Infeasible(
            f"node {node} ({self.graph.nodes[node].name}) must have a choice that "
            "is not forbidden, but all are, by its costs or its edges; allow one."
        )

    def _drop_dominated(self, node: int) -> None:
        size, call = self.costs[node].size, self.pool.call
        if size == 1:
            return
        edges, number = list(self.halves[node].values()), self.pool.number
        edges.sort(key=lambda edge: (number(edge[0]), number(edge[1])))
        flat = [array for edge in edges for array in edge]
        work = size * size * (len(edges) + 1)
        kept, lost = call(min_plus.undominated, self._costs_of(node), *flat, work=work)
        if kept.size < self.costs[node].size:
            self.slack += lost
            self._keep(node, kept)

    def _keep(self, node: int, kept: np.ndarray) -> None:
        call, kept = self.pool.call, self.pool.intern(kept)
        self.steps.append(Drop(node, kept))
        self.costs[node] = self.costs[node][kept]
        for other, (classes, matrix) in list(self.halves[node].items()):
            classes, smaller = call(min_plus.restrict, classes, matrix, kept)
            if smaller is matrix:
                self.halves[node][other] = classes, matrix
            else:
                classes2, _ = self.halves[other][node]
                self._remove_edge(node, other)
                self._put_edge(node, other, classes, classes2, smaller)

    def _put_edge(
        self,
        node: int,
        other: int,
        classes: np.ndarray,
        classes2: np.ndarray,
        matrix: np.ndarray,
    ) -> None:
        """Adds an edge, merged with the one that is there, in normal form."""
        call = self.pool.call
        if other in self.halves[node]:
            present, present_matrix = self.halves[node][other]
            present2, _ = self.halves[other][node]
            classes, classes2, matrix = call(
                min_plus.merge_parallel,
                *(present, present2, present_matrix, classes, classes2, matrix),
            )
            self._remove_edge(node, other)
        self._put_normal(node, other, self._normal(classes, classes2, matrix))

    def _normal(
        self, classes: np.ndarray, classes2: np.ndarray, matrix: np.ndarray
    ) -> _NormalEdge:
        rows, columns, small, row_costs, column_costs, deviation = self.pool.call(
            min_plus.normalise, matrix
        )
        here = there = None
        if small is not None:
            first, second, transposed = self.pool.call(
                min_plus.both_ends, rows, columns, classes, classes2, small
            )
            here, there = (first, small), (second, transposed)
        return _NormalEdge(
            here,
            there,
            None if row_costs is None else row_costs[classes],
            None if column_costs is None else column_costs[classes2],
            deviation,
        )

    def _put_normal(self, node: int, other: int, edge: _NormalEdge) -> None:
        """Adds an edge between nodes that have none."""
        self.slack += edge.deviation
        if edge.costs is not None:
            self.costs[node] = self.costs[node] + edge.costs
        if edge.costs2 is not None:
            self.costs[other] = self.costs[other] + edge.costs2
        if edge.here is not None and edge.there is not None:
            self.halves[node][other] = edge.here
            self.halves[other][node] = edge.there
        self._push(node)
        self._push(other)

    def _remove_edge(self, node: int, other: int) -> None:
        del self.halves[node][other], self.halves[other][node]

    def _fold_work(self, node: int) -> float:
        """How many sums it takes to minimise a node out; inf if it has to stay."""
        if len(self.halves[node]) > 2:
            return inf
        sizes = [matrix.shape[1] for _, matrix in self.halves[node].values()]
        return self.costs[node].size * prod(sizes)

    def _fold(self, node: int) -> None:
        call, costs = self.pool.call, self._costs_of(node)
        around = tuple(
            (other, *half, self.halves[other][node][0])
            for other, half in self.halves[node].items()
        )
        if costs.min() == inf:
            raise self._infeasible(node)
        if not around:
            self.constant += float(costs.min())
        elif len(around) == 1:
            ((other, classes, matrix, classes2),) = around
            values = call(min_plus.fold_leaf, costs, classes, matrix)
            self._remove_edge(node, other)
            self.costs[other] = self.costs[other] + values[classes2]
            self._push(other)
        else:
            (left, classes, matrix, left_classes) = around[0]
            (right, classes2, matrix2, right_classes) = around[1]
            work = costs.size * matrix.shape[1] * matrix2.shape[1]
            sides = classes, matrix, classes2, matrix2
            values = call(min_plus.fold_pair, costs, *sides, work=work)
            self._remove_edge(node, left)
            self._remove_edge(node, right)
            self._put_edge(left, right, left_classes, right_classes, values)
        sides = [array for _, here, matrix, _ in around for array in (here, matrix)]
        best = call(BestChoice, costs, *sides)
        neighbours = tuple((other, there) for other, _, _, there in around)
        self.steps.append(Fold(node, neighbours, best))
        self.is_folded[node] = True

    def _result(self) -> Reduced:
        kept = [v for v in range(len(self.costs)) if not self.is_folded[v]]
        index_by_node = {node: index for index, node in enumerate(kept)}
        nodes = tuple(
            Node(self.graph.nodes[v].name, costs, np.zeros(costs.size))
            for v, costs in ((v, self._costs_of(v)) for v in kept)
        )
        edges = tuple(
            Edge(
                *(index_by_node[v], index_by_node[u]),
                *(classes, self.halves[u][v][0], matrix),
            )
            for v in kept
            for u, (classes, matrix) in self.halves[v].items()
            if v < u
        )
        return Reduced(
            ChoiceGraph(nodes, edges, constant=self.constant),
            self.slack,
            tuple(kept),
            len(self.costs),
            tuple(self.steps),
        )


@dataclass(frozen=True, eq=False)
class Drop:
    """A node kept some of its choices."""

    node: int
    kept: np.ndarray

    def undo_choice(self, choices: list[int]) -> None:
        choices[self.node] = int(self.kept[choices[self.node]])


class BestChoice:
    """The best choice of a node, given the classes of its neighbours' choices.

    Of equal ones it is the first that is undominated, as in nodes that are left.
    `sides` are (classes, matrix [classes here, classes there]) of each edge, flattened.
    Asked for few of all combinations, it works them out one by one.
    """

    def __init__(self, costs: np.ndarray, *sides: np.ndarray) -> None:
        self.costs = costs
        self.sides = tuple(zip(sides[::2], sides[1::2], strict=True))
        self._rounding = min_plus.QUANTUM * np.max(costs, where=costs < inf, initial=0)
        self._known: dict[tuple[int, ...], int] = {}

    def given(self, where: tuple[int, ...]) -> int:
        """The best choice where neighbour i makes a choice of class `where[i]`."""
        if where not in self._known:
            total = self.costs
            for (here, matrix), column in zip(self.sides, where, strict=True):
                total = total + matrix[:, column][here]
            best = np.flatnonzero(total <= total.min() + self._rounding)
            if best.size > 1:
                left = best[self._is_undominated[best]]
                best = left if left.size else best
            self._known[where] = int(best[0])
        return self._known[where]

    @cached_property
    def _is_undominated(self) -> np.ndarray:
        usable = np.flatnonzero(self.costs < inf)
        edges = [
            array for here, matrix in self.sides for array in (here[usable], matrix)
        ]
        kept, _ = min_plus.undominated(self.costs[usable], *edges)
        is_kept = np.zeros(self.costs.size, bool)
        is_kept[usable[kept]] = True
        return is_kept


@dataclass(frozen=True, eq=False)
class Fold:
    """A node was minimised out.

    `neighbours` are (node, its classes at the edge) of its at most two edges.
    """

    node: int
    neighbours: tuple[tuple[int, np.ndarray], ...]
    best: BestChoice

    def undo_choice(self, choices: list[int]) -> None:
        where = tuple([int(there[choices[v]]) for v, there in self.neighbours])
        choices[self.node] = self.best.given(where)


Step = Drop | Fold


def unfold_choices(
    steps: Sequence[Step], num_nodes: int, kept: Sequence[int], choices: Sequence[int]
) -> tuple[int, ...]:
    """Choices of the original nodes from those of the nodes `kept`."""
    full = [0] * num_nodes
    for node, choice in zip(kept, choices, strict=False):
        full[node] = int(choice)
    for step in reversed(steps):
        step.undo_choice(full)
    return tuple(full)
