"""A better assignment near one that is known: all but a few nodes stay as they are.

Large-neighbourhood search (Shaw 1998): the nodes around one, along edges, are free, the
others keep their choices. What is left is so small that an integer program closes it
at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .budget import WithinRows
from .choice_graph import ChoiceGraph, Infeasible, Node
from .memory_rows import MemoryRow
from .search import Search

MOST_WORK = 2.0  # seconds, of one neighbourhood; see `clock.py`
_NODE = 2e-5  # seconds of a usual core, to hold one


class Neighbourhoods:
    """Sets of nodes around each of those that may be decided otherwise."""

    def __init__(self, graph: ChoiceGraph) -> None:
        self.graph = graph
        self.is_open = np.array(
            [np.count_nonzero(np.isfinite(node.costs)) > 1 for node in graph.nodes]
        )
        neighbours: list[set[int]] = [set() for _ in graph.nodes]
        types = graph.types
        for one, other in zip(types.first.tolist(), types.second.tolist(), strict=True):
            neighbours[one].add(other)
            neighbours[other].add(one)
        self._neighbours = [sorted(each) for each in neighbours]

    def around(self, node: int, size: int) -> np.ndarray:
        """Bool [nodes]: the `size` nearest open nodes, and what lies between."""
        found, is_met = [node], np.zeros(len(self._neighbours), bool)
        is_met[node] = True
        number, is_near = 0, np.zeros(len(self._neighbours), bool)
        for each in found:  # grows
            is_near[each] = True
            number += bool(self.is_open[each])
            if number >= size:
                break
            for other in self._neighbours[each]:
                if not is_met[other]:
                    is_met[other] = True
                    found.append(other)
        return is_near


def best_near(
    graph: ChoiceGraph,
    choices: Sequence[int],
    is_free: np.ndarray,
    rows: Sequence[MemoryRow],
    budget: float,
    *,
    gap: float,
    pool: ArrayPool,
    below: float | None = None,
) -> tuple[int, ...] | None:
    """The cheapest assignment that no row puts above the budget, near a known one.

    Args:
        graph: the problem; its live sets and budget are not looked at.
        choices: the assignment that is known; rows may put it above the budget.
        is_free: bool [nodes], which may be decided otherwise.
        rows: all that is said about memory.
        budget: what each row may come to.
        gap: relative distance from the best of these at which to stop.
        pool: shared arrays of reductions.
        below: the cost that it is to be below; that of `choices` if left out.

    None if none is cheaper, by more than the gap, or the work was up.
    """
    near = _held(graph, choices, is_free)
    pool.clock.spend(_NODE * len(graph.nodes))
    cost = graph.cost(choices) if below is None else below
    search = Search(near, gap, pool.clock.spent + MOST_WORK, pool, cutoff=cost)
    search.raise_bound(0.0)
    try:
        WithinRows(search, rows, budget).run([choices])
    except Infeasible:
        return None
    worth = cost if cost == inf else cost - gap * abs(cost)
    return search.choices if search.cost < worth else None


def _held(
    graph: ChoiceGraph, choices: Sequence[int], is_free: np.ndarray
) -> ChoiceGraph:
    """The graph, each node that is not free with its one choice."""
    known: dict[tuple[int, int], np.ndarray] = {}
    nodes = list(graph.nodes)
    for index in np.flatnonzero(~is_free).tolist():
        node, choice = nodes[index], choices[index]
        key = id(node.costs), choice
        if key not in known:
            known[key] = np.full(node.costs.size, inf)
            known[key][choice] = node.costs[choice]
        nodes[index] = Node(node.name, known[key], node.bytes)
    return replace(graph, nodes=tuple(nodes), live_sets=(), budget=None)
