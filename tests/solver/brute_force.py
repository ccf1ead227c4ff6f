"""The oracle for tests: tries every assignment."""

from itertools import product
from math import inf, prod

from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import ChoiceGraph, Infeasible

MOST_ASSIGNMENTS = 2_000_000


def brute_force(graph: ChoiceGraph) -> Assignment:
    """The optimal assignment, by enumeration; Infeasible where there is none."""
    sizes = [node.costs.size for node in graph.nodes]
    if prod(sizes) > MOST_ASSIGNMENTS:
        raise ValueError(
            f"brute force tries at most {MOST_ASSIGNMENTS} assignments, but got "
            f"{prod(sizes)}; use solve()."
        )
    best, best_cost = None, inf
    for choices in product(*map(range, sizes)):
        cost = graph.cost(choices)
        if cost < best_cost:
            best, best_cost = choices, cost
    if best is None:
        raise Infeasible("an assignment must be allowed, but all are forbidden.")
    return Assignment(best, best_cost, best_cost)
