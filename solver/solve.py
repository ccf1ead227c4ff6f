"""From a choice graph to an assignment and a bound.

Without a budget, or where the cheapest plan fits it: free.py. With one that binds:
budget.py.
"""

from collections.abc import Sequence
from time import perf_counter

from .array_pool import ArrayPool
from .assignment import Assignment
from .choice_graph import ChoiceGraph
from .free import solve_free
from .search import Search


def solve(
    graph: ChoiceGraph,
    *,
    gap: float = 1e-4,
    time_limit_seconds: float = 60.0,
    initial: Sequence[int] | None = None,
) -> Assignment:
    """The best assignment found, with a bound on all others.

    Args:
        graph: the problem; see ChoiceGraph.
        gap: relative distance of bound to cost at which to stop.
        time_limit_seconds: when to stop with what there is.
        initial: a plan already known, within budget or not.

    Raises:
        Infeasible: nothing is allowed, or nothing fits; carries the least budget.
    """
    deadline = perf_counter() + time_limit_seconds
    search = Search(graph, gap, deadline, ArrayPool())
    if initial is not None:
        search.offer(initial)
    solve_free(search)
    return search.result()
