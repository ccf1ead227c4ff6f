"""The oracle for tests: tries every assignment."""

from itertools import product
from math import inf, prod

from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import ChoiceGraph, Infeasible

MOST_ASSIGNMENTS = 2_000_000


def brute_force(graph: ChoiceGraph) -> Assignment:
    """The optimal assignment, by enumeration.

    Raises Infeasible, with the exact least budget, where there is none.
    """
    sizes = [node.costs.size for node in graph.nodes]
    if prod(sizes) > MOST_ASSIGNMENTS:
        raise ValueError(
            f"brute force tries at most {MOST_ASSIGNMENTS} assignments, but got "
            f"{prod(sizes)}; use solve()."
        )
    best, best_cost, least_budget = None, inf, inf
    for choices in product(*map(range, sizes)):
        cost = graph.cost(choices)
        if cost == inf:
            continue
        least_budget = min(least_budget, graph.peak_bytes(choices))
        if cost < best_cost and graph.is_within_budget(choices):
            best, best_cost = choices, cost
    if best is None:
        raise Infeasible(
            f"an assignment must fit the budget {graph.budget}, but the least that "
            f"does is {least_budget}; use that."
        )
    return Assignment(best, best_cost, best_cost, graph.peak_bytes(best))
