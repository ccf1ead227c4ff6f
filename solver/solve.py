"""From a choice graph to an assignment and a bound (free.py), within limits of work."""

import logging
from collections.abc import Sequence
from math import inf

from .array_pool import ArrayPool
from .assignment import Assignment
from .choice_graph import ChoiceGraph
from .clock import Clock
from .free import solve_free
from .search import Search

_log = logging.getLogger("autopar")


def solve(
    graph: ChoiceGraph,
    *,
    gap: float = 1e-4,
    work_limit: float = 60.0,
    time_limit_seconds: float = 600.0,
    initial: Sequence[int] | None = None,
    folds: bool = True,
    cutoff: float = inf,
) -> Assignment:
    """The best assignment found, with a bound on all others.

    Args:
        graph: the problem; see ChoiceGraph.
        gap: relative distance of bound to cost at which to stop.
        work_limit: when to stop with what there is, in seconds of work (`clock.py`).
        time_limit_seconds: when to stop at the latest, in seconds that pass; what was
            found then depends on the machine.
        initial: a plan already known.
        folds: whether few of many equal layers may stand for all at first.
        cutoff: plans that cost as much or more are of no use: with a plan at hand, a
            bound that reaches it ends the search.

    Raises:
        Infeasible: nothing is allowed.
    """
    clock = Clock(time_limit_seconds)
    search = Search(graph, gap, work_limit, ArrayPool(clock), cutoff)
    if initial is not None:
        search.offer(initial)
    solve_free(search, folds=folds)
    if search.choices is None:
        raise TimeoutError(
            "The time limit must be enough for a first plan, but was not; raise "
            "`time_limit_seconds` or give an `initial` plan."
        )
    if not search.is_closed and search.seconds_left <= 0:
        _log.warning(
            "The solver's %g s of work were spent before its work was done: the plan "
            "has a gap of %.2f%%%s; raise `work_limit`, or leave less to choose.",
            *(work_limit, 100 * search.result().gap),
            " and depends on the machine" * clock.is_late,
        )
    return _noted(search.result(), graph)


def _noted(found: Assignment, graph: ChoiceGraph) -> Assignment:
    """Also to who listens: records have the assignment and the size of its problem."""
    sizes = {
        "nodes": len(graph.nodes),
        "choices": graph.num_choices,
        "edges": len(graph.edges),
    }
    _log.debug("%s", found, extra={"assignment": found, "sizes": sizes})
    return found
