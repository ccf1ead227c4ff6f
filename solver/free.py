"""Solving without a budget: join copies, then reduce, pass messages, fix, and again;
last the ILP.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible
from .fix import fix
from .ilp import is_small_enough, solve_ilp
from .join import join_copies
from .messages import pass_messages
from .reduce import Reduced, reduce
from .search import Search

WORTH_REDUCING_AGAIN = 0.05


def solve_free(search: Search) -> list[np.ndarray]:
    """Closes the gap of `search.graph`, whose budget is not looked at.

    Returns, per node [k], a lower bound on the plans that make each choice.

    Raises:
        Infeasible: every plan is forbidden.
    """
    joined = join_copies(search.graph, search.pool)
    graph, expand = joined.graph, joined.expand
    marginals: list[np.ndarray] = []
    slack, ceiling, seconds = 0.0, inf, search.seconds_left
    while True:
        try:
            reduced = reduce(graph, search.pool)
        except Infeasible:
            if search.cost == inf:
                raise
            search.raise_bound(ceiling)
            search.finish_phase("fix", replace(graph, nodes=(), edges=()))
            return marginals
        expand = _compose(expand, reduced)
        slack += reduced.slack
        core = reduced.graph
        search.finish_phase("reduce", core)
        messages = pass_messages(
            core,
            gap=search.gap / 2,
            cost=search.cost,
            time_limit_seconds=min(search.seconds_left, seconds / 2),
        )
        if messages.choices is not None:
            search.offer(expand(messages.choices))
        search.raise_bound(min(messages.bound - slack, ceiling))
        search.finish_phase("messages", core)
        excess = [m - messages.bound for m in messages.marginals]
        if not marginals:
            full = joined.expand_excess(reduced.expand_excess(excess))
            marginals = [beyond + (messages.bound - slack) for beyond in full]
        if search.is_closed or search.seconds_left <= 0:
            return marginals
        ceiling = min(ceiling, search.threshold)
        fixed, num_fixed = fix(
            core, excess, search.threshold - (messages.bound - slack)
        )
        num_choices = sum(node.costs.size for node in core.nodes)
        if num_fixed > WORTH_REDUCING_AGAIN * num_choices:
            graph = fixed
            continue
        if is_small_enough(fixed):
            _finish_with_ilp(search, fixed, expand, slack, ceiling)
        return marginals


def _finish_with_ilp(
    search: Search,
    graph: ChoiceGraph,
    expand: Callable[[Sequence[int]], tuple[int, ...]],
    slack: float,
    ceiling: float,
) -> None:
    result = solve_ilp(graph, gap=search.gap, time_limit_seconds=search.seconds_left)
    if result.choices is not None:
        search.offer(expand(result.choices))
    elif result.bound == ceiling == inf:
        raise Infeasible(
            "some assignment must be allowed, but forbidden pairs exclude every one; "
            "allow more choices or pairs."
        )
    search.raise_bound(min(result.bound - slack, ceiling))
    search.finish_phase("ilp", graph)


def _compose(
    expand: Callable[[Sequence[int]], tuple[int, ...]], reduced: Reduced
) -> Callable[[Sequence[int]], tuple[int, ...]]:
    return lambda choices: expand(reduced.expand(choices))
