"""Finding a plan: the best one among the choices that messages hold likely.

Messages converge to the optimum's cost long before any plan rounded from them does. By
then few choices have a marginal near the bound, and among those the ILP is exact and
takes milliseconds.
"""

from collections.abc import Sequence

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .fix import fix
from .ilp import is_small_enough, solve_ilp
from .reduce import reduce

MOST_LIKELY_CHOICES = 1000  # beyond one per node
MOST_LIKELY_PAIRS = 30_000


def improve_among_likely(
    graph: ChoiceGraph,
    choices: Sequence[int],
    marginals: Sequence[np.ndarray],
    pool: ArrayPool,
    *,
    gap: float,
    work_limit: float,
    most_choices: int = MOST_LIKELY_CHOICES,
    cutoff: float = np.inf,
) -> tuple[int, ...]:
    """A plan that costs no more than `choices`. The budget is not looked at.

    Args:
        graph: the graph.
        choices: an allowed plan.
        marginals: per node [k], a lower bound on the cost of the plans that make each
            choice; those of the least are likely.
        pool: shared arrays of reductions.
        gap: relative distance from the best of these plans at which to stop.
        work_limit: most seconds of work of the ILP.
        most_choices: how many choices to look at beyond one per node.
        cutoff: plans that cost as much or more are not looked for.
    """
    ranks = [np.where(m == m.min(), -np.inf, m) for m in marginals]
    for rank, choice in zip(ranks, choices, strict=True):
        rank[choice] = -np.inf
    if not ranks:
        return tuple(choices)
    flat = np.sort(np.concatenate(ranks))
    num_sure = int(np.searchsorted(flat, -np.inf, side="right"))
    last = min(num_sure + most_choices, flat.size) - 1
    likely, _ = fix(graph, ranks, flat[last])
    reduced = reduce(likely, pool)
    if not reduced.graph.nodes:
        return reduced.expand(())
    if not is_small_enough(reduced.graph, work_limit, MOST_LIKELY_PAIRS):
        return tuple(choices)
    found = solve_ilp(
        reduced.graph,
        gap=gap,
        work_limit=work_limit,
        clock=pool.clock,
        cost=graph.cost(choices),
        cutoff=cutoff,
    )
    if found.choices is None:
        return tuple(choices)
    better = reduced.expand(found.choices)
    return better if graph.cost(better) < graph.cost(choices) else tuple(choices)
