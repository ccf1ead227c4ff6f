"""The cheapest plan within a memory budget, by prices on what is full.

A plan is looked at by an oracle, which tells what it holds, and the rows of its fullest
points: what other plans would hold there. In turn

    prices  the duals of the linear program over the plans seen: mix them at the least
            cost so that no row is above the budget
    plan    the cheapest one at these prices, from the solver without a budget (equal
            layers fold); it is looked at, and its rows join
    mix     of the plans that are best at the prices, each cluster of nodes follows one
            (`plan_combinations.py`)

Rows are linear, plans are not: what a row says too much of the best plan is taken off.
The least memory is found in the same way, with bytes worth far more than costs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .assignment import Assignment
from .budget_constraints import BudgetRow, cost_row, priced
from .choice_graph import ChoiceGraph, Infeasible
from .clock import Clock
from .free import solve_free
from .plan_combinations import Mixtures
from .search import Search

PRICED_GAP = 0.03  # at which plans at prices are taken: their true bytes are looked at
PRICED_WORK = 20.0  # seconds of work, see clock.py
LACKING = 100.0  # times the first cost, what lacking the whole budget costs
MOST_LOOKS = 40
MOST_IN_VAIN = 3  # looks in a row that find nothing better
ROUNDS = 2
LEAST_OVER_COST = 20.0  # times the first cost, what all bytes of it are worth
DOUBT = 0.5  # of what a plan is above the budget, that its rows may be wrong by
MOST_TOGETHER = 6  # plans that are mixed
WORTH = 3e-3  # of the cost, that another look or round must save


@dataclass(frozen=True, eq=False)
class Found:
    """One plan that was looked at: its cost, the bytes it holds, its fullest points."""

    choices: tuple[int, ...]
    cost: float
    bytes: float
    rows: tuple[BudgetRow, ...]

    def __str__(self) -> str:
        return f"Found: cost {self.cost:.6g}, {self.bytes:.6g} bytes"


Look = Callable[[tuple[int, ...]], Found]


@dataclass(frozen=True, eq=False)
class Within:
    """`best`: the cheapest that fits, or None; `least`: of the fewest bytes seen."""

    best: Found | None
    least: Found
    seen: tuple[Found, ...]

    def __str__(self) -> str:
        best = "nothing fits" if self.best is None else f"cost {self.best.cost:.6g}"
        return (
            f"Within: {best}, least {self.least.bytes:.6g} bytes, "
            f"{len(self.seen)} plans looked at"
        )


def solve_within(
    graph: ChoiceGraph,
    budget: float,
    look: Look,
    *,
    free: Assignment,
    starts: Iterable[Sequence[int]] = (),
) -> Within:
    """The cheapest plan found that fits.

    Args:
        graph: the problem; its own live sets and budget are not looked at.
        budget: bytes that a plan may hold.
        look: the oracle.
        free: the solution without a budget.
        starts: other plans that are worth a look.
    """
    search = _Search(graph, look, budget)
    for choices in (free.choices, *starts):
        search.see(choices)
    search.price()
    if search.best is None:
        search.find_least(budget)
    for _ in range(ROUNDS if search.best else 0):
        before = search.value
        search.mix()
        search.price()
        if not search.is_better(before):
            break
    return Within(search.best, search.least, tuple(search.seen.values()))


def least_memory(
    graph: ChoiceGraph,
    look: Look,
    *,
    starts: Iterable[Sequence[int]],
    enough: float = 0.0,
) -> Found:
    """The plan of the fewest bytes found, or the first of no more than is `enough`."""
    search = _Search(graph, look, None)
    for choices in starts:
        search.see(choices)
    search.find_least(enough)
    return search.least


@dataclass(eq=False)
class _Search:
    """Plans seen and their rows. Without a budget it is bytes that are to be least."""

    graph: ChoiceGraph
    look: Look
    budget: float | None
    enough: float = 0.0
    seen: dict[tuple[int, ...], Found] = field(default_factory=dict)
    rows: list[BudgetRow] = field(default_factory=list)
    owners: list[Found] = field(default_factory=list)  # [rows]
    used: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [rows, plans]

    def see(self, choices: Sequence[int]) -> Found:
        """Looks at a plan, unless it was."""
        plan = tuple(map(int, choices))
        if plan not in self.seen:
            found = self.seen[plan] = self.look(plan)
            own = self._used_by(self.rows, np.array([plan], np.intp))
            more = self._used_by(found.rows, np.array(list(self.seen), np.intp))
            self.used = np.concatenate([np.hstack([self.used, own]), more])
            self.rows += found.rows
            self.owners += [found] * len(found.rows)
        return self.seen[plan]

    def _used_by(self, rows: Sequence[BudgetRow], plans: np.ndarray) -> np.ndarray:
        """[rows, plans] the bytes that rows say of plans [plans, nodes]."""
        used = [row.used_by(self.graph, plans) for row in rows]
        return np.array(used).reshape(len(rows), len(plans))

    @property
    def best(self) -> Found | None:
        """The cheapest that fits."""
        most = self.enough if self.budget is None else self.budget
        fitting = [each for each in self.seen.values() if each.bytes <= most]
        return min(fitting, key=lambda each: each.cost, default=None)

    @property
    def least(self) -> Found:
        """That of the fewest bytes."""
        return min(self.seen.values(), key=lambda each: (each.bytes, each.cost))

    def find_least(self, enough: float) -> None:
        """Looks at plans of fewer bytes, until one has no more than is enough."""
        budget, self.budget, self.enough = self.budget, None, enough
        self.price()
        self.mix()
        self.budget = budget

    @property
    def value(self) -> tuple[float, float]:
        """What is to be least: bytes until a plan fits, then costs."""
        if self.best is None or self.budget is None:
            return inf, self.least.bytes
        return self.best.cost, 0.0

    def is_better(self, before: tuple[float, float]) -> bool:
        """Whether what is to be least has clearly become less."""
        pairs = zip(self.value, before, strict=True)
        return any(now < (1 - WORTH) * then for now, then in pairs)

    def price(self) -> None:
        """Looks at plans that are the cheapest at prices, as long as it is of use."""
        in_vain = 0
        while in_vain < MOST_IN_VAIN and not self._is_over:
            prices = self._prices()
            before, plan = self.value, self._cheapest(prices)
            if plan is None or plan in self.seen or not self._is_worth(plan, prices):
                return
            self.see(plan)
            in_vain = 0 if self.is_better(before) else in_vain + 1

    def _is_worth(self, plan: tuple[int, ...], prices: np.ndarray) -> bool:
        """Whether a plan is clearly cheaper at the prices than all that were seen.

        If none is, no mixture of plans is cheaper than those of the seen ones are.
        """
        if self.budget is None:
            return True
        costs = np.array([each.cost for each in self.seen.values()])
        own = self._used_by(self.rows, np.array([plan], np.intp))[:, 0]
        least = float((costs + prices @ self._held()).min())
        priced = self.graph.cost(plan) + float(prices @ own)
        return least - priced > WORTH * float(costs.min())

    def _held(self) -> np.ndarray:
        """[rows, plans] what rows say; no point of a plan holds more than it does."""
        return np.minimum(self.used, [each.bytes for each in self.seen.values()])

    @property
    def _is_over(self) -> bool:
        is_enough = self.budget is None and self.least.bytes <= self.enough
        return is_enough or len(self.seen) >= MOST_LOOKS

    def _prices(self) -> np.ndarray:
        """[rows] the duals of mixing the plans seen within the budget, or to the least
        bytes."""
        plans = list(self.seen.values())
        cost, lacking = np.zeros(len(plans)), 1.0
        if self.budget is not None:
            cost = np.array([each.cost for each in plans])
            lacking = LACKING * cost.min() / self.budget
        return prices_of_rows(cost, lacking, self._held(), self._limits())

    def _limits(self) -> np.ndarray:
        """[rows] what each may say: more than the budget, if it does so of the best."""
        base = self.best or self.least
        number = list(self.seen).index(base.choices)
        beyond = np.maximum(self.used[:, number] - base.bytes, 0.0)
        if self.budget is None:
            return beyond
        above = np.array([each.bytes for each in self.owners]) - self.budget
        most = np.where(above > 0, DOUBT * above, beyond)
        return self.budget + np.minimum(beyond, most)

    def _cheapest(self, prices: np.ndarray) -> tuple[int, ...] | None:
        """The cheapest plan where bytes have prices."""
        if self.budget is None:  # costs keep it from what is of no use elsewhere
            first = next(iter(self.seen.values()))
            prices = prices * (LEAST_OVER_COST * first.cost / max(first.bytes, 1.0))
        graph = priced(self.graph, self.rows, prices)
        inner = Search(graph, PRICED_GAP, PRICED_WORK, ArrayPool(Clock()))
        costs = [graph.cost(plan) for plan in self.seen]
        inner.offer(list(self.seen)[int(np.argmin(costs))])
        try:
            solve_free(inner, folds=True)
        except Infeasible:
            return None
        return inner.choices

    def mix(self) -> None:
        """Looks at the best mixtures of plans by the rows, as long as it is of use."""
        in_vain = 0
        while in_vain < MOST_IN_VAIN and not self._is_over:
            before, plan = self.value, self._mixture()
            if plan in self.seen:
                return
            found = self.see(plan)
            is_close = self.budget is None or found.bytes <= self.budget
            in_vain += 0 if self.is_better(before) else 1 + is_close

    def _mixture(self) -> tuple[int, ...]:
        prices = self._prices()
        plans = list(self.seen.values())
        table = np.array([each.choices for each in plans], np.intp)
        has_costs = self.budget is not None
        costs = np.array([each.cost for each in plans]) * has_costs
        order = np.argsort(costs + prices @ self.used, kind="stable")[:MOST_TOGETHER]
        kept = {*order.tolist(), plans.index(self.best or self.least)}
        size = plans[0].cost if has_costs else plans[0].bytes
        mixtures = Mixtures(
            self.graph,
            self.cost,
            self.rows,
            table[sorted(kept)],
            has_costs=has_costs,
            size=size,
            unit=self.budget or plans[0].bytes,
            lacking=LACKING,
        )
        return mixtures.rounded(self._limits(), WORTH)

    @cached_property
    def cost(self) -> BudgetRow:
        """Costs in the form of a row."""
        return cost_row(self.graph)


def prices_of_rows(
    cost: np.ndarray, lacking: float, used: np.ndarray, limit: np.ndarray
) -> np.ndarray:
    """[rows] the duals of min sum_p x_p cost_p + lacking s, where the shares x of plans
    add up to one and sum_p x_p used_rp <= limit_r + s."""
    from scipy.optimize import linprog  # takes as long as jax to import

    size = max(float(used.max()), 1.0)
    unit = max(float(cost.max()), lacking * size)  # HiGHS gives up on huge costs
    found = linprog(
        np.append(cost, lacking * size) / unit,
        A_ub=np.hstack([used / size, np.full((len(used), 1), -1.0)]),
        b_ub=limit / size,
        A_eq=np.append(np.ones(len(cost)), 0.0)[None],
        b_eq=[1.0],
        method="highs",
    )
    return np.maximum(-found.ineqlin.marginals, 0.0) * unit / size
