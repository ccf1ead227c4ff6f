"""Solving within rows of memory by prices, where a graph is too large for more.

    mixture    of the plans met, some clusters of nodes by the one and some by the other
               (mixing.py): with n equal layers between two plans the gap is about what
               one layer makes, a part 1 / n
    prices     the duals of the mixture's linear program; where it has no solution,
               those where the least line of all plans met is highest (multipliers.py)
    at them    the graph has no budget, and equal layers: free.py solves it, for a bound
               on every assignment that fits and for a new plan, to be mixed in

As long as nothing fits, memory costs at most a limit, which rises. Plans met are kept:
a later call, with other rows or another budget, starts from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .clock import Clock
from .folded import solve_folded
from .free import solve_free
from .memory_rows import MemoryRow
from .mixing import FEW_CHECKS, MOST_CHECKS, Mixtures, Shares
from .multipliers import best_prices, price, price_of_peak
from .search import Search

MOST_PRICES = 12  # of one call
MOST_MIXED = 5  # plans by each prices
LIMITS = 1.0, 1e4  # times the free plan's cost, for a budget's worth of bytes
INNER_GAP = 0.15  # of the gap that is wanted
NEAR = 0.5  # of it: mixtures are rounded before any prices
MOST_IN_VAIN = 3  # prices that move neither bound nor cost
ROUNDING = 1e-3
MOST_WORK = 30.0  # seconds, of one free solution; see `clock.py`


@dataclass(frozen=True, eq=False)
class _Line:
    """What was proved at prices on some rows: a bound for every budget."""

    rows: tuple[MemoryRow, ...]
    prices: tuple[float, ...]
    at_no_budget: float

    def bound(
        self,
        budget: float,
        lowered: Mapping[int, tuple[MemoryRow, float]],
        admitted: Sequence[int] | None = None,
    ) -> float:
        """The bound with rows as they are now, `lowered` by what was taken off each.

        It is -inf if one of its rows has no successor (by id).
        """
        bound = self.at_no_budget
        for row, amount in zip(self.rows, self.prices, strict=True):
            if id(row) not in lowered:
                return -inf
            now, taken_off = lowered[id(row)]
            own = budget if admitted is None else now.used(admitted)
            bound -= amount * (max(budget, own) + taken_off)
        return bound


class PricedPlans:
    """The plans of a graph that were met, and the search for those within rows.

    Budgets and live sets of the graph are not looked at.
    """

    def __init__(self, graph: ChoiceGraph, pool: ArrayPool | None = None) -> None:
        self.graph, self.pool = graph, pool or ArrayPool(Clock())
        self.plans: list[tuple[int, ...]] = []
        self._arrays: list[np.ndarray] = []  # the same
        self.costs: list[float] = []
        self._number: dict[tuple[int, ...], int] = {}
        self._used: dict[int, tuple[MemoryRow, list[float]]] = {}
        self._prices = np.zeros(0)
        self._lines: list[_Line] = []

    def count_on(self, clock: Clock) -> None:
        """Counts what is done from now on, on another clock."""
        self.pool = ArrayPool(clock)

    def add(self, choices: Sequence[int]) -> None:
        """Keeps a plan, if it is allowed and new."""
        plan = tuple(choices)
        if plan in self._number:
            return
        cost = self.graph.cost(plan)
        if cost < inf:
            self._number[plan] = len(self.plans)
            self.plans.append(plan)
            self._arrays.append(np.array(plan, np.intp))
            self.costs.append(cost)

    def used(self, rows: Sequence[MemoryRow]) -> np.ndarray:
        """[plans, rows] what each plan uses."""
        known, self._used = self._used, {}
        for row in rows:
            entry = known.get(id(row), (row, []))
            entry[1].extend(row.used(x) for x in self._arrays[len(entry[1]) :])
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
        self._prices = _Closing(self, search, rows, budget, aim).run(self._prices)
        return self._prices

    def mix(self, search: Search, rows: Sequence[MemoryRow], budget: float) -> None:
        """Offers a search plans that fit, and a mixture of those met."""
        _Closing(self, search, rows, budget, budget).mix()

    def keep(
        self, rows: Sequence[MemoryRow], prices: np.ndarray, budget: float, bound: float
    ) -> None:
        priced, total = np.flatnonzero(prices).tolist(), float(prices.sum())
        own = tuple(rows[r] for r in priced), tuple(prices[priced].tolist())
        self._lines.append(_Line(*own, bound + total * budget))

    def known_bound(
        self,
        rows: Sequence[MemoryRow],
        budget: float,
        admitted: Sequence[int] | None = None,
    ) -> float:
        """What earlier calls proved of some of these rows; others only add to it.

        Of rows that were lowered since it is lower by what was taken off, at its
        prices. Each row may come to what `admitted` holds by it, if that is above the
        budget.
        """
        here = {key: found for row in rows for key, found in _befores(row)}
        bounds = (x.bound(budget, here, admitted) for x in self._lines)
        return max(bounds, default=-inf)

    def offered(
        self, search: Search, rows: Sequence[MemoryRow], budget: float
    ) -> np.ndarray:
        """Offers the plans that fit; [plans, rows] what all plans met use."""
        used = self.used(rows)
        for number in np.flatnonzero((used <= budget).all(axis=1)).tolist():
            if self.costs[number] < search.cost:
                search.offer(self.plans[number])
        return used

    def least_peak(self, rows: Sequence[MemoryRow], prices: np.ndarray) -> float:
        """A bound on every assignment's peak, by the proportions of some prices."""
        if not prices.any():
            return 0.0
        inner = self.peak_at(rows, prices)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound

    def peak_at(self, rows: Sequence[MemoryRow], prices: np.ndarray) -> Search:
        priced = price_of_peak(self.graph, rows, prices / max(prices.sum(), 1e-250))
        inner = Search(priced, 1e-3, self._until, self.pool)
        solve_free(inner, with_ilp=False, folds=True)
        return inner

    @property
    def _until(self) -> float:
        return self.pool.clock.spent + MOST_WORK

    def solve_at(
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
            inner.pool = ArrayPool(self.pool.clock)  # what is merged is large
            solve_free(inner, with_ilp=False)
        if inner.choices is not None:
            self.add(inner.choices)
        return inner.bound


class _Closing:
    """One call of `close`: prices, and what the plans met say of them.

    `value` is about what the cheapest plan within the aim costs, by mixtures or else by
    lines, and `reach` what the bound at the prices comes to at most, by what is known.
    """

    def __init__(
        self,
        plans: PricedPlans,
        search: Search,
        rows: Sequence[MemoryRow],
        budget: float,
        aim: float,
    ) -> None:
        self.plans, self.search, self.rows = plans, search, rows
        self.budget, self.aim = budget, aim
        self.limits = list(LIMITS)
        self.prices, self.value, self.reach = np.zeros(len(rows)), inf, inf
        self.best_prices, self.best_bound = self.prices, -inf
        self.is_bounded = False
        self.shares: Shares | None = None
        self._mixed: set[tuple[tuple[int, ...], bool]] = set()

    def run(self, known: np.ndarray) -> np.ndarray:
        """Raises the bound and offers plans; the prices of the best bound."""
        search, num_in_vain = self.search, 0
        self.prices[: known.size] = known[: len(self.rows)]
        self.best_prices = self.prices
        search.raise_bound(self.plans.known_bound(self.rows, self.budget))
        for number in range(MOST_PRICES):
            reached = search.bound, search.cost
            self._look()
            if search.bound >= search.cutoff:
                break
            beyond = self.reach - search.bound
            if search.cost == inf or self._may_mix(beyond, has_priced=number > 0):
                self._mix(rounds_only=True)
            if self._is_over():
                break
            if beyond <= INNER_GAP * search.gap * abs(self.reach):
                if not self._raises_limit():
                    break
                continue
            is_new = self._price()
            num_in_vain = 0 if _has_moved(search, *reached) else num_in_vain + 1
            if not is_new or num_in_vain == MOST_IN_VAIN:
                break
        self._finish()
        return self.best_prices

    def mix(self) -> None:
        """Offers the plans that fit, and a mixture of the likely ones."""
        self._look()
        self._mix(rounds_only=True, most_checks=FEW_CHECKS)

    def _may_mix(self, beyond: float, *, has_priced: bool) -> bool:
        """Whether mixtures are rounded while prices may find other plans to mix.

        The bound lacks `beyond` of what it may come to; the plan may lack more.
        """
        gap, lacking = self.search.gap, self.search.cost - self.value
        if not has_priced:
            return beyond <= NEAR * gap * abs(self.reach)
        is_near = beyond <= gap * abs(self.reach)
        return is_near or lacking > gap * abs(self.value)

    def _is_over(self) -> bool:
        return self.search.is_closed or self.search.seconds_left <= 0

    def _look(self) -> None:
        """Prices by all plans met; those that fit are offered."""
        plans, aim = self.plans, self.aim
        used = plans.offered(self.search, self.rows, aim)
        has_plan = bool((used <= aim).all(axis=1).any())
        most = inf if has_plan else self.limits[0] * abs(plans.costs[0])
        prices, value = best_prices(plans.costs, used, aim, most=most)
        costs = np.array(plans.costs)
        likely = {len(costs) - 1}
        for each in (prices, self.prices):
            order = np.argsort(costs + (used - aim) @ each, kind="stable")
            likely.update(order[:MOST_MIXED].tolist())
        self.likely = tuple(sorted(likely))
        table = [plans.plans[number] for number in self.likely]
        clock = plans.pool.clock
        self.mixtures = Mixtures(plans.graph, self.rows, table, clock)
        self.shares = self.mixtures.shares(aim)
        self.is_bounded = has_plan or self.shares is not None
        if self.shares is not None:
            prices, value = self.shares.prices, self.shares.value
        self.prices, self.value = prices, value
        self.reach = value - (self.budget - aim) * float(prices.sum())

    def _raises_limit(self) -> bool:
        """Whether nothing fits at a limit on prices, and a higher one may do."""
        if self.is_bounded or len(self.limits) == 1:
            return False
        self.limits.pop(0)
        return self.plans.peak_at(self.rows, self.prices).bound <= self.budget

    def _price(self) -> bool:
        """Solves the graph at the prices; whether bound or plan are new."""
        plans, search, prices = self.plans, self.search, self.prices
        num_plans = len(plans.plans)
        worth = INNER_GAP * search.gap * abs(self.reach) * self.is_bounded
        lines = np.array(plans.costs) + plans.used(self.rows) @ prices
        nearest = plans.plans[int(lines.argmin())]
        priced = price(plans.graph, self.rows, prices, self.budget)
        bound = plans.solve_at(search, priced, search.bound + worth, nearest)
        plans.keep(self.rows, prices, self.budget, bound)
        search.raise_bound(bound)
        is_better = bound > self.best_bound
        if is_better:
            self.best_prices, self.best_bound = prices, bound
        search.finish_phase("prices", plans.graph)
        return is_better or len(plans.plans) > num_plans

    def _mix(self, rounds_only: bool = False, most_checks: int = MOST_CHECKS) -> None:
        """Offers a mixture of the likely plans, if one may be worth it.

        `rounds_only`: prices, which are quicker than a tree, may still do better.
        """
        search = self.search
        worth = INNER_GAP * search.gap * abs(self.value)
        is_worth_it = self.shares is not None and search.cost - self.value > worth
        if not is_worth_it or (self.likely, rounds_only) in self._mixed:
            return
        self._mixed.add((self.likely, rounds_only))
        gap = 2 * INNER_GAP * search.gap
        found = self.mixtures.cheapest(
            self.aim,
            gap=gap,
            cost=search.cost,
            enough=max(_above(search.bound, search.gap), _above(self.value, gap)),
            rounds_only=rounds_only,
            most_checks=most_checks,
        )
        if found is not None:
            self.plans.add(found)
            search.offer(found)
        search.finish_phase("mix", self.plans.graph)

    def _finish(self) -> None:
        """Offers what was met last."""
        search = self.search
        if not self._is_over():
            self._look()
        if not self._is_over() and search.bound < search.cutoff:
            self._mix()
        is_enough = search.bound >= search.cutoff
        self.plans.offered(search, self.rows, self.budget if is_enough else self.aim)


def _befores(row: MemoryRow) -> Iterator[tuple[int, tuple[MemoryRow, float]]]:
    """A row as it was each time before it was lowered: its id, and what came off."""
    taken_off, before = 0.0, row
    while True:
        yield id(before), (row, taken_off)
        if before.before is None:
            return
        taken_off, before = taken_off + before.taken_off, before.before


def _above(bound: float, gap: float) -> float:
    return bound + gap * (1 - ROUNDING) * abs(bound)


def _has_moved(search: Search, bound: float, cost: float) -> bool:
    """Whether bound or cost is better by a part of the wanted gap."""
    worth = INNER_GAP * search.gap * abs(search.bound)
    return search.bound > bound + worth or search.cost < cost - worth
