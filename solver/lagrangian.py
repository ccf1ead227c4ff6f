"""Solving within rows of memory by prices, where a graph is too large for more.

    prices     those where the least line of all plans met is highest (multipliers.py)
    at them    the graph has no budget, and equal layers: free.py solves it, for a bound
               on every assignment that fits and for a new plan
    mixture    the plans that are best at the prices, some clusters of nodes by the one
               and some by the other (mixing.py): with n equal layers between two plans
               the gap is about what one layer makes, a part 1 / n

As long as no plan fits, memory costs at most a limit, which rises. Plans met are kept:
a later call, with other rows or another budget, starts from them.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .clock import Clock
from .free import solve_free
from .memory_rows import MemoryRow
from .mixing import mix
from .multipliers import best_prices, price, price_of_peak
from .search import Search

MOST_PRICES = 12  # of one call
NUM_BETWEEN = 2  # prices half-way from the best known, where rows are new
MOST_MIXED = 5  # plans
LIMITS = 1.0, 1e4  # times the free plan's cost, for a budget's worth of bytes
INNER_GAP = 0.15  # of the gap that is wanted
WORTH_MIXING = 3.0
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
        self._prices = np.zeros(0)
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
        limits = list(LIMITS)
        known, best_bound = np.zeros(len(rows)), -inf
        has_new_rows = len(rows) > self._prices.size
        known[: self._prices.size] = self._prices[: len(rows)]
        self._mixed.clear()
        for number in range(MOST_PRICES):
            used = self.used(rows)
            self._offer(search, used, aim)
            has_plan = bool((used <= budget).all(axis=1).any())
            most = inf if has_plan else limits[0] * abs(self.costs[0])
            prices, value = best_prices(self.costs, used, budget, most=most)
            beyond = value - search.bound
            if beyond <= WORTH_MIXING * search.gap * abs(value) or not has_plan:
                self._mix(search, rows, used, prices, aim)
            if search.is_closed or search.seconds_left <= 0:
                break
            if beyond <= INNER_GAP * search.gap * abs(value):
                if has_plan or len(limits) == 1:
                    break
                limits.pop(0)
                continue
            if has_plan and has_new_rows and known.any() and number < NUM_BETWEEN:
                prices = (prices + known) / 2
            bound = self._at(search, price(self.graph, rows, prices, budget))
            search.raise_bound(bound)
            if bound > best_bound:
                known, best_bound = prices, bound
            search.finish_phase("prices", self.graph)
        self._offer(search, self.used(rows), aim)
        self._prices = known
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
        solve_free(inner, with_ilp=False, folds=True)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound

    @property
    def _until(self) -> float:
        return self.pool.clock.spent + MOST_WORK

    def _at(self, search: Search, priced: ChoiceGraph) -> float:
        """The bound at prices; the plan is kept."""
        gap = INNER_GAP * search.gap
        inner = Search(priced, gap, min(search.deadline, self._until), self.pool)
        solve_free(inner, with_ilp=False, folds=True)
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
        gap = 2 * INNER_GAP * search.gap
        found = mix(self.graph, rows, budget, plans, gap=gap, cost=search.cost)
        if found is not None:
            self.add(found)
            search.offer(found)
        search.finish_phase("mix", self.graph)
