"""Solving within rows of memory by prices, where a graph is too large for more.

    prices     those where the least line of all plans met is highest (multipliers.py)
    at them    the graph has no budget, and equal layers: free.py solves it, for a bound
               on every assignment that fits and for a new plan; roughly, until that
               says nothing new
    mixture    the plans that are best at the prices, some clusters of nodes by the one
               and some by the other (mixing.py): with n equal layers between two plans
               the gap is about what one layer makes, a part 1 / n

As long as no plan fits, memory costs at most a limit, which rises. Plans met are kept,
and so are bounds (dual_points.py): a later call, with other rows or another budget,
starts from them, and often ends with them.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .clock import Clock
from .dual_points import DualPoints
from .free import solve_once
from .memory_rows import MemoryRow
from .mixing import mix
from .multipliers import best_prices, price, price_of_peak
from .search import Search

MOST_PRICES = 12  # of one call
MOST_MIXED = 5  # plans
LIMITS = (
    1.0,
    4.0,
    100.0,
    1e4,
)  # times the free plan's cost, for a budget's worth of bytes
INNER_GAP = 0.15  # of the gap that is wanted
ROUGH_GAP = 0.4  # likewise, of rough solutions
MIXED_GAP = 0.4  # likewise, of mixtures
SAME_PRICES = 1e-3
MOST_WORK = 4.0  # seconds, of one free solution; see `clock.py`


class PricedPlans:
    """The plans of a graph that were met, and the search for those within rows.

    Budgets and live sets of the graph are not looked at.
    """

    def __init__(self, graph: ChoiceGraph, pool: ArrayPool | None = None) -> None:
        self.graph, self.pool = graph, pool or ArrayPool(Clock())
        self.plans: list[tuple[int, ...]] = []
        self.costs: list[float] = []
        self._number: dict[tuple[int, ...], int] = {}
        self._used: dict[int, tuple[MemoryRow, list[float]]] = {}
        self._duals = DualPoints()
        self._mixed: set[tuple[int, ...]] = set()  # plans, in this call

    def add(self, choices: Sequence[int]) -> None:
        """Keeps a plan, if it is allowed and new."""
        plan = tuple(choices)
        if plan in self._number:
            return
        cost = self.graph.cost(plan)
        if cost < inf:
            self._number[plan] = len(self.plans)
            self.plans.append(plan)
            self.costs.append(cost)

    def used(self, rows: Sequence[MemoryRow]) -> np.ndarray:
        """[plans, rows] what each plan uses."""
        known, self._used = self._used, {}
        for row in rows:
            entry = known.get(id(row), (row, []))
            entry[1].extend(row.used(x) for x in self.plans[len(entry[1]) :])
            self._used[id(row)] = entry
        columns = [self._used[id(row)][1] for row in rows]
        return np.array(columns, np.float64).reshape(len(rows), -1).T

    def close(
        self,
        search: Search,
        rows: Sequence[MemoryRow],
        budget: float,
        aim: float | None = None,
    ) -> np.ndarray:
        """Raises the bound of a search and offers it plans that fit; the best prices.

        The bound is on all plans within `budget`; those offered are within `aim`, which
        is no more. Rows of an earlier call come first and in the same order.
        """
        aim = budget if aim is None else aim
        limits, is_rough = iter(LIMITS), True
        self._duals.follow(rows)
        known, bound = self._duals.best(budget)
        search.raise_bound(bound)
        self._mixed.clear()
        worth = INNER_GAP * search.gap
        for _ in range(MOST_PRICES):
            used = self.used(rows)
            self._offer(search, used, aim)
            has_plan = bool((used <= budget).all(axis=1).any())
            limit = inf if has_plan else next(limits, None)
            if limit is None:
                break
            prices, value = best_prices(
                *(self.costs, used, budget),
                most=limit * abs(self.costs[0]),
                known=known if known.any() and has_plan else None,
                bound=bound,
            )
            beyond = value - search.bound
            if beyond <= search.gap * abs(value) or not has_plan:
                self._mix(search, rows, used, prices, aim)
            if search.is_closed or search.seconds_left <= 0:
                break
            if beyond <= worth * abs(value):
                if has_plan:
                    break
                continue
            is_rough &= not np.allclose(prices, known, rtol=SAME_PRICES, atol=0.0)
            priced, before = price(self.graph, rows, prices, budget), search.bound
            count = len(self.plans)
            found = self._at(search, priced, is_rough=is_rough)
            self._duals.add(prices, found, budget)
            search.raise_bound(found)
            known, bound = self._duals.best(budget)
            search.finish_phase("prices", self.graph)
            gained = search.bound - before
            if len(self.plans) == count and gained <= worth * abs(search.bound):
                if not is_rough:
                    break
                is_rough = False
        used = self.used(rows)
        self._offer(search, used, aim)
        if not search.is_closed and known.any():
            self._mix(search, rows, used, known, aim)
        return known

    def offer(self, search: Search, rows: Sequence[MemoryRow], budget: float) -> float:
        """Offers the plans that fit; the least peak of all plans met."""
        used = self.used(rows)
        self._offer(search, used, budget)
        return float(used.max(axis=1, initial=0.0).min(initial=inf))

    def least_peak(self, rows: Sequence[MemoryRow], prices: np.ndarray) -> float:
        """A bound on every assignment's peak, by the proportions of some prices."""
        if not prices.any():
            return 0.0
        priced = price_of_peak(self.graph, rows, prices / prices.sum())
        inner = Search(priced, 1e-3, self._until, self.pool)
        solve_once(inner, is_rough=False)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound

    @property
    def _until(self) -> float:
        return self.pool.clock.spent + MOST_WORK

    def _at(self, search: Search, priced: ChoiceGraph, *, is_rough: bool) -> float:
        """The bound at prices; the plan is kept."""
        gap = (ROUGH_GAP if is_rough else INNER_GAP) * search.gap
        inner = Search(priced, gap, min(search.deadline, self._until), self.pool)
        solve_once(inner, is_rough=is_rough)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound

    def _offer(self, search: Search, used: np.ndarray, budget: float) -> None:
        fits = (used <= budget).all(axis=1)
        for number in np.flatnonzero(fits).tolist():
            if self.costs[number] < search.cost:
                search.offer(self.plans[number])

    def _mix(
        self,
        search: Search,
        rows: Sequence[MemoryRow],
        used: np.ndarray,
        prices: np.ndarray,
        budget: float,
    ) -> None:
        """Offers a mixture of the plans that are best at some prices."""
        values = np.array(self.costs) + (used - budget) @ prices
        likely = sorted(np.argsort(values, kind="stable")[:MOST_MIXED].tolist())
        if tuple(likely) in self._mixed:
            return
        self._mixed.add(tuple(likely))
        plans = [self.plans[number] for number in likely]
        found = mix(
            *(self.graph, rows, budget, plans),
            gap=MIXED_GAP * search.gap,
            cost=search.cost,
            enough=search.bound / (1 - search.gap) if search.bound > 0 else -inf,
        )
        if found is not None:
            self.add(found)
            search.offer(found)
        search.finish_phase("mix", self.graph)
