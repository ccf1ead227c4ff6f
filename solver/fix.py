"""Fixing: choices that no assignment cheaper than a threshold makes are forbidden."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Node


def fix(
    graph: ChoiceGraph, marginals: Sequence[np.ndarray], threshold: float
) -> tuple[ChoiceGraph, int]:
    """The graph, its choices in place, with inf for a cost where they are forbidden
    because only plans above `threshold` make them, and how many of them are.

    `marginals` are per node [k] a lower bound on the cost of the plans that make each
    choice.
    """
    nodes, num_fixed = list(graph.nodes), 0
    for index, (node, marginal) in enumerate(zip(nodes, marginals, strict=True)):
        is_forbidden = (marginal > threshold) & (node.costs < inf)
        if is_forbidden.any():
            costs = np.where(is_forbidden, inf, node.costs)
            nodes[index] = Node(node.name, costs, node.bytes)
            num_fixed += int(is_forbidden.sum())
    return replace(graph, nodes=tuple(nodes)), num_fixed
