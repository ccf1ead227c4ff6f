"""Fixing: choices that no assignment cheaper than a threshold makes are forbidden."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Node


def fix(
    graph: ChoiceGraph, excess: Sequence[np.ndarray], most: float
) -> tuple[ChoiceGraph, int]:
    """Forbids the choices whose excess is above `most`.

    Args:
        graph: the graph.
        excess: per node [k], a bound on what a choice costs beyond the bound of the
            whole (fewer nodes than the graph has: the rest is left alone).
        most: the threshold less the bound of the whole.

    Returns:
        The graph, its choices in place with inf for a cost, and how many were newly
        forbidden.
    """
    nodes, num_fixed = list(graph.nodes), 0
    for index, beyond in enumerate(excess):
        node = nodes[index]
        is_fixed = (beyond > most) & (node.costs < inf)
        if is_fixed.any():
            costs = np.where(is_fixed, inf, node.costs)
            nodes[index] = Node(node.name, costs, node.bytes)
            num_fixed += int(is_fixed.sum())
    return replace(graph, nodes=tuple(nodes)), num_fixed
