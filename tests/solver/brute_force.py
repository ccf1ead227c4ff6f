"""The oracle for tests: tries every assignment."""

from math import prod

import numpy as np

from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import ChoiceGraph, Infeasible

MOST_ASSIGNMENTS = 2_000_000


def brute_force(graph: ChoiceGraph) -> Assignment:
    """The optimal assignment, by enumeration; Infeasible where there is none."""
    total = every_cost(graph)
    best = np.unravel_index(total.argmin(), total.shape)
    cost = float(total[best])
    if cost == np.inf:
        raise Infeasible("an assignment must be allowed, but all are forbidden.")
    return Assignment(tuple(map(int, best)), cost, cost)


def every_cost(graph: ChoiceGraph) -> np.ndarray:
    """What each assignment costs, by the choice of each node."""
    sizes = [node.costs.size for node in graph.nodes]
    if prod(sizes) > MOST_ASSIGNMENTS:
        raise ValueError(
            f"brute force tries at most {MOST_ASSIGNMENTS} assignments, but got "
            f"{prod(sizes)}; use solve()."
        )
    choices = np.ogrid[tuple(map(slice, sizes))]
    total = np.full(sizes, graph.constant)
    for node, choice in zip(graph.nodes, choices, strict=True):
        total += node.costs[choice]
    for edge in graph.edges:
        row = edge.first_class[choices[edge.first]]
        total += edge.costs[row, edge.second_class[choices[edge.second]]]
    return total
