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
from dataclasses import dataclass
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .clock import Clock
from .folded import solve_folded
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
MOST_IN_VAIN = 3  # prices that move neither bound nor cost
MOST_WORK = 4.0  # seconds, of one free solution; see `clock.py`


@dataclass(frozen=True, eq=False)
class _Line:
    """What was proved at prices on some rows: a bound for every budget."""

    rows: tuple[MemoryRow, ...]
    price: float  # of all rows together
    at_no_budget: float

    def bound(self, budget: float) -> float:
        return self.at_no_budget - self.price * budget


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
        self._lines: list[_Line] = []

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
        is no more, unless the bound is at the search's cutoff. Rows of an earlier call
        come first and in the same order.
        """
        aim = budget if aim is None else aim
        limits = list(LIMITS)
        known, best_bound = np.zeros(len(rows)), -inf
        has_new_rows = len(rows) > self._prices.size
        known[: self._prices.size] = self._prices[: len(rows)]
        self._mixed.clear()
        search.raise_bound(self.known_bound(rows, budget))
        num_in_vain, work_at, work_mixing = 0, 0.0, 0.0
        for number in range(MOST_PRICES):
            used = self.used(rows)
            self._offer(search, used, aim)
            if search.bound >= search.cutoff:
                break
            has_plan = bool((used <= budget).all(axis=1).any())
            most = inf if has_plan else limits[0] * abs(self.costs[0])
            prices, value = best_prices(self.costs, used, budget, most=most)
            beyond = value - search.bound
            is_near = beyond <= WORTH_MIXING * search.gap * abs(value)
            reached, start = (search.bound, search.cost), self.pool.clock.spent
            if is_near or not has_plan or work_mixing < work_at:
                self._mix(search, rows, used, prices, aim)
                work_mixing += self.pool.clock.spent - start
            if search.is_closed or search.seconds_left <= 0:
                break
            if beyond <= INNER_GAP * search.gap * abs(value):
                if has_plan or len(limits) == 1:
                    break
                if self._peak_at(rows, prices).bound > budget:
                    break  # nothing fits
                limits.pop(0)
                continue
            if has_plan and has_new_rows and known.any() and number < NUM_BETWEEN:
                prices = (prices + known) / 2
            num_plans, start = len(self.plans), self.pool.clock.spent
            useless = search.bound + INNER_GAP * search.gap * abs(value) * has_plan
            priced = price(self.graph, rows, prices, budget)
            lines = np.array(self.costs[: len(used)]) + (used - budget) @ prices
            bound = self._at(search, priced, useless, self.plans[int(lines.argmin())])
            self._keep(rows, prices, budget, bound)
            work_at += self.pool.clock.spent - start
            search.raise_bound(bound)
            is_stuck = len(self.plans) == num_plans and bound <= best_bound
            if bound > best_bound:
                known, best_bound = prices, bound
            search.finish_phase("prices", self.graph)
            is_in_vain = not _has_moved(search, *reached)
            num_in_vain = num_in_vain + 1 if is_in_vain else 0
            if is_stuck or num_in_vain == MOST_IN_VAIN:
                break
        is_over = search.bound >= search.cutoff
        self._offer(search, self.used(rows), budget if is_over else aim)
        self._prices = known
        return known

    def _keep(
        self, rows: Sequence[MemoryRow], prices: np.ndarray, budget: float, bound: float
    ) -> None:
        priced, total = np.flatnonzero(prices).tolist(), float(prices.sum())
        line = _Line(tuple(rows[r] for r in priced), total, bound + total * budget)
        self._lines.append(line)

    def known_bound(self, rows: Sequence[MemoryRow], budget: float) -> float:
        """What earlier calls proved of some of these rows; others only add to it."""
        here = set(map(id, rows))
        return max(
            (x.bound(budget) for x in self._lines if here.issuperset(map(id, x.rows))),
            default=-inf,
        )

    def offer(self, search: Search, rows: Sequence[MemoryRow], budget: float) -> float:
        """Offers the plans that fit; the least peak of all plans met."""
        used = self.used(rows)
        self._offer(search, used, budget)
        return float(used.max(axis=1, initial=0.0).min(initial=inf))

    def least_peak(self, rows: Sequence[MemoryRow], prices: np.ndarray) -> float:
        """A bound on every assignment's peak, by the proportions of some prices."""
        if not prices.any():
            return 0.0
        inner = self._peak_at(rows, prices)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound

    def _peak_at(self, rows: Sequence[MemoryRow], prices: np.ndarray) -> Search:
        priced = price_of_peak(self.graph, rows, prices / max(prices.sum(), 1e-250))
        inner = Search(priced, 1e-3, self._until, self.pool)
        solve_free(inner, with_ilp=False, folds=True)
        return inner

    @property
    def _until(self) -> float:
        return self.pool.clock.spent + MOST_WORK

    def _at(
        self,
        search: Search,
        priced: ChoiceGraph,
        useless: float,
        known: tuple[int, ...],
    ) -> float:
        """The bound at prices, if it may be above a useless one; the plan is kept.

        `known` is the plan that is the best there of those met.
        """
        gap, until = INNER_GAP * search.gap, min(search.deadline, self._until)
        inner = Search(priced, gap, until, self.pool, known_bound=useless)
        inner.offer(known)
        solve_folded(inner, solve_free)
        if inner.bound == -inf:  # no equal layers, or they do not agree
            solve_free(inner, with_ilp=False)
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
        found = mix(
            *(self.graph, rows, budget, plans),
            gap=gap,
            cost=search.cost,
            clock=self.pool.clock,
        )
        if found is not None:
            self.add(found)
            search.offer(found)
        search.finish_phase("mix", self.graph)


def _has_moved(search: Search, bound: float, cost: float) -> bool:
    """Whether bound or cost is better by a part of the wanted gap."""
    worth = INNER_GAP * search.gap * abs(search.bound)
    return search.bound > bound + worth or search.cost < cost - worth
