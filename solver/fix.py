"""Fixing: choices that no assignment cheaper than a threshold makes are forbidden."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Node


@dataclass(frozen=True, eq=False)
class Fixed:
    """The graph, its choices in place with inf for a cost where they were forbidden."""

    graph: ChoiceGraph
    num_fixed: int

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The same choices."""
        return tuple(choices)

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
    nodes, num_fixed = list(graph.nodes), 0
    for index, marginal in enumerate(marginals):
        node = nodes[index]
        is_forbidden = (marginal > threshold) & (node.costs < inf)
        if is_forbidden.any():
            costs = np.where(is_forbidden, inf, node.costs)
            nodes[index] = Node(node.name, costs, node.bytes)
            num_fixed += int(is_forbidden.sum())
    return Fixed(replace(graph, nodes=tuple(nodes)), num_fixed)
