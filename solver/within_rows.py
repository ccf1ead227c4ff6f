"""The cheapest assignment within rows of memory: by prices, and whole if it is small.

Prices and mixtures (lagrangian.py) take a few solutions without a budget, whatever the
size. What gap they leave, integer programs close (budget.py) where the graph is small
enough.
"""

from collections.abc import Sequence
from copy import copy
from math import inf

from .array_pool import ArrayPool
from .assignment import Assignment
from .budget import WithinRows
from .choice_graph import ChoiceGraph
from .clock import Clock
from .lagrangian import PricedPlans
from .memory_rows import MemoryRow, does_not_fit
from .search import Search

FEW_NODES = 400  # that are left when the graph is reduced
MANY_NODES = 2500
MOST_WORK = 60.0  # seconds; see `clock.py`
GUARD_SECONDS = 1200.0


def solve_within_rows(
    graph: ChoiceGraph,
    rows: Sequence[MemoryRow],
    budget: float,
    *,
    gap: float,
    free: Assignment,
    known: Sequence[Sequence[int]] = (),
    aim: float | None = None,
    plans: PricedPlans | None = None,
    most_work: float = MOST_WORK,
    cutoff: float = inf,
) -> Assignment:
    """The cheapest assignment that no row puts above the budget, with a bound.

    Args:
        graph: the problem; its live sets and budget are not looked at.
        rows: all that is said about memory; each may come to `budget`.
        gap: relative distance of bound to cost at which to stop.
        free: the solution without rows, or its assignment with a bound within them.
        known: assignments met before, that fit or not.
        aim: what rows of the assignment come to at most, if less than the budget; the
            bound is on all that fit the budget.
        plans: those of earlier searches in the graph, with other rows or budgets.
        most_work: seconds of work after which the best plan is returned with its gap.
        cutoff: a bound that is enough; then it is any plan within the budget.

    Raises Infeasible where nothing fits, or nothing was found that does.
    """
    plans = plans or PricedPlans(graph, ArrayPool(Clock(GUARD_SECONDS)))
    search = Search(graph, gap, plans.pool.clock.spent + most_work, plans.pool, cutoff)
    search.raise_bound(free.bound)
    for each in (free.choices, *known):
        plans.add(each)
    aim = budget if aim is None else min(aim, budget)
    # Integer programs have no bound on plans that are above the aim.
    within = search if aim == budget else copy(search)
    whole = None
    if len(graph.nodes) <= MANY_NODES:
        whole = WithinRows(within, rows, aim, finds_least=False)
    if whole is None or len(whole.graph.nodes) > FEW_NODES:
        _price_and_mix(search, plans, rows, budget, aim)
    if whole is not None and not search.is_closed:
        within.raise_bound(search.bound)
        if search.choices is not None:
            within.offer(search.choices)
        whole.run(plans.plans)
        if within.choices is not None:
            search.offer(within.choices)
    return search.result()


def mix_within_rows(
    plans: PricedPlans,
    rows: Sequence[MemoryRow],
    budget: float,
    *,
    gap: float,
    free: Assignment,
    known: Sequence[Sequence[int]] = (),
    most_work: float = MOST_WORK,
) -> Assignment:
    """A cheap mixture of plans met that no row puts above the budget.

    It takes little work, and its bound is that of `free`, the solution without rows.
    Raises Infeasible where none was found.
    """
    for each in (free.choices, *known):
        plans.add(each)
    spent = plans.pool.clock.spent
    search = Search(plans.graph, gap, spent + most_work, plans.pool)
    search.raise_bound(free.bound)
    plans.mix(search, rows, budget)
    if search.choices is None:
        raise does_not_fit(budget, 0.0, inf)
    return search.result()


def _price_and_mix(
    search: Search,
    plans: PricedPlans,
    rows: Sequence[MemoryRow],
    budget: float,
    aim: float,
) -> None:
    prices = plans.close(search, rows, budget, aim)
    if search.choices is None:
        bound = plans.least_peak(rows, prices)
        used = plans.offered(search, rows, aim)
        least = float(used.max(axis=1, initial=0.0).min(initial=inf))
        if bound > aim or (
            search.choices is None and len(search.graph.nodes) > MANY_NODES
        ):
            raise does_not_fit(aim, min(bound, least), least)
