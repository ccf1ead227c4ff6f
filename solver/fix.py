"""Fixing: choices that no assignment cheaper than a threshold makes are forbidden."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Node


@dataclass(frozen=True, eq=False)
class Fixed:
    """The graph, its choices in place with inf for a cost where they were forbidden.

    Every assignment that makes one of those costs at least `threshold`.
    """

    graph: ChoiceGraph
    threshold: float
    num_fixed: int
    _forbidden: tuple[tuple[int, np.ndarray], ...]

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The same choices."""
        return tuple(choices)

    def expand_excess(
        self, excess: Sequence[np.ndarray], bound: float
    ) -> list[np.ndarray]:
        """Forbidden choices cost at least the threshold, `bound` the others."""
        full = list(excess)
        for node, is_forbidden in self._forbidden:
            beyond = max(self.threshold - bound, 0.0)
            full[node] = np.where(is_forbidden, beyond, full[node])
        return full

    def __str__(self) -> str:
        return f"Fixed {self.num_fixed} choices of {self.graph}"


def fix(graph: ChoiceGraph, marginals: Sequence[np.ndarray], threshold: float) -> Fixed:
    """Forbids the choices that only plans above `threshold` make.

    Args:
        graph: the graph.
        marginals: per node [k], a lower bound on the cost of the plans that make each
            choice (for fewer nodes than the graph has: the rest is left alone).
        threshold: the cost above which plans are of no interest.
    """
    nodes, forbidden = list(graph.nodes), []
    for index, marginal in enumerate(marginals):
        node = nodes[index]
        is_forbidden = (marginal > threshold) & (node.costs < inf)
        if is_forbidden.any():
            costs = np.where(is_forbidden, inf, node.costs)
            nodes[index] = Node(node.name, costs, node.bytes)
            forbidden.append((index, is_forbidden))
    num_fixed = sum(int(is_forbidden.sum()) for _, is_forbidden in forbidden)
    fixed = replace(graph, nodes=tuple(nodes))
    return Fixed(fixed, threshold, num_fixed, tuple(forbidden))
