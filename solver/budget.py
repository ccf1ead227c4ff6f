"""Solving within a budget that binds.

1. Prices on memory give a bound and plans on both sides of the budget (multipliers.py).
2. What costs too much at the best prices is fixed (the priced cost of a plan that fits
   is at most its cost).
3. An ILP mixes the plans seen: every node takes its choice from one of them, so that
   some layers follow the cheap plan and some the small one.
4. The ILP over everything that is left, where that is small enough.
"""

from collections.abc import Sequence
from math import inf
from time import perf_counter

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible
from .fix import fix
from .free import bound_choices, solve_free
from .ilp import is_small_enough, solve_ilp
from .live_sets import keep_binding
from .multipliers import SeenPlan, best_prices, least_peak_prices, price
from .reduce import reduce
from .search import Search

MOST_PRICES_IN_VAIN = 2
MOST_PEAK_ROUNDS = 12
PRICED_GAP = 0.25
MOST_ROUNDS = 8
WORTH_PRICING_AGAIN = 0.02


def solve_within_budget(search: Search, known: Sequence[Sequence[int]]) -> None:
    """Closes the gap of `search.graph` as far as time allows.

    `known` are plans within budget or not, the best without the budget among them.

    Raises:
        Infeasible: nothing fits, or nothing was found that does.
    """
    _WithinBudget(search).run(known)


class _WithinBudget:
    def __init__(self, search: Search) -> None:
        self.search = search
        self.seconds = search.seconds_left
        self.plans: list[SeenPlan] = []
        self.ceiling = inf
        self.graph = search.graph

    def run(self, known: Sequence[Sequence[int]]) -> None:
        try:
            self._run(known)
        finally:
            self.search.seen = tuple(dict.fromkeys(p.choices for p in self.plans))

    def _run(self, known: Sequence[Sequence[int]]) -> None:
        search = self.search
        for choices in known:
            self._see(choices)
        self._find_one_that_fits()
        if search.choices is None:
            return
        self.graph = keep_binding(search.graph)
        self._see(search.choices)
        self._forget_forbidden()
        for _ in range(MOST_ROUNDS):
            marginals = self._price()
            if search.is_closed or search.seconds_left <= 0:
                return
            self._mix()
            if search.is_closed or search.seconds_left <= 0:
                return
            num_fixed = self._fix(marginals)
            search.finish_phase("fix", self.graph)
            if num_fixed < WORTH_PRICING_AGAIN * search.graph.num_choices:
                break
        self._solve_ilp(self.graph, search.seconds_left, "ilp", is_bound=True)

    def _see(self, choices: Sequence[int]) -> SeenPlan:
        used = self.graph.used_bytes(choices)
        plan = SeenPlan(tuple(choices), self.search.graph.cost(choices), used)
        self.plans.append(plan)
        self.search.offer(choices)
        return plan

    def _forget_forbidden(self) -> None:
        """Keeps the plans that are still allowed, and those that fit."""
        choices = [plan.choices for plan in self.plans]
        self.plans = []
        for plan in dict.fromkeys(choices):
            if self.graph.cost(plan) < inf or self.search.graph.is_within_budget(plan):
                self._see(plan)

    def _solve_priced(
        self, prices: np.ndarray, with_costs: bool, gap: float
    ) -> tuple[SeenPlan, float, list[np.ndarray]]:
        """A plan, a bound and, of priced costs, the marginals."""
        deadline = perf_counter() + min(self.search.seconds_left, self.seconds / 10)
        priced = price(self.graph, prices, with_costs)
        inner, marginals = Search(priced, gap, deadline, self.search.pool), []
        if with_costs:
            marginals = bound_choices(inner, self.search.threshold)
        else:
            solve_free(inner, with_ilp=False)
        if inner.choices is None:
            raise Infeasible("the time was up before any plan was found")
        return self._see(inner.choices), inner.bound, marginals

    def _find_one_that_fits(self) -> None:
        search = self.search
        if search.choices is not None:
            return
        budget = search.graph.budget or 0.0
        bound = self._least_peak(stop_at=budget)
        search.finish_phase("least bytes", self.graph)
        if search.choices is None and bound <= budget:
            try:
                self.graph = keep_binding(search.graph)
                self._solve_ilp(self.graph, self.seconds / 4, "first fit", False)
            except Infeasible:
                bound = max(bound, budget)
        if search.choices is None:
            raise _does_not_fit(search.graph, self.plans, bound)

    def _least_peak(self, stop_at: float) -> float:
        """Sees plans of ever smaller peaks, down to `stop_at`; returns a bound."""
        graph = self.graph
        least, bound = inf, 0.0
        prices = np.full(len(graph.live_sets), 1.0 / max(len(graph.live_sets), 1))
        seen: list[SeenPlan] = []
        for _ in range(MOST_PEAK_ROUNDS):
            plan, value, _ = self._solve_priced(prices, False, 1e-6)
            seen.append(plan)
            least, bound = min(least, plan.used.max(initial=0.0)), max(bound, value)
            if least <= stop_at or bound > max(stop_at, least * (1 - 1e-6)):
                break
            if self.search.seconds_left < self.seconds / 2:
                break
            prices, top = least_peak_prices(seen)
            if top <= bound * (1 + 1e-6):
                break
        return bound

    def _price(self) -> list[np.ndarray]:
        """Raises the bound to the best prices; returns the marginals there."""
        search, budget = self.search, self.graph.budget or 0.0
        best, marginals, num_in_vain = -inf, [], 0
        while num_in_vain < MOST_PRICES_IN_VAIN:
            prices, top = best_prices(self.plans, budget)
            if top - best <= PRICED_GAP * search.gap * abs(top) + 1e-12 * abs(top):
                break
            before = search.cost
            _, bound, found = self._solve_priced(prices, True, search.gap * PRICED_GAP)
            search.raise_bound(min(bound, self.ceiling))
            is_better = bound > best + search.gap * abs(bound) or search.cost < before
            num_in_vain = 0 if is_better else num_in_vain + 1
            if bound > best or not marginals:
                best, marginals = max(best, bound), found
            search.finish_phase("prices", self.graph)
            if search.is_closed or search.seconds_left < self.seconds / 4:
                break
        return marginals

    def _mix(self) -> None:
        nodes = list(self.graph.nodes)
        marginals = []
        for index, node in enumerate(nodes):
            is_seen = np.zeros(node.costs.size, bool)
            is_seen[[plan.choices[index] for plan in self.plans]] = True
            marginals.append(np.where(is_seen, -inf, inf))
        seen = fix(self.graph, marginals, 0.0)
        limit = min(self.search.seconds_left / 2, self.seconds / 6)
        self._solve_ilp(seen.graph, limit, "mix", is_bound=False)

    def _fix(self, marginals: Sequence[np.ndarray]) -> int:
        self.ceiling = min(self.ceiling, self.search.threshold)
        fixed = fix(self.graph, marginals, self.search.threshold)
        try:
            self.graph = keep_binding(fixed.graph)
        except Infeasible:
            self.search.raise_bound(self.ceiling)
        self._forget_forbidden()
        return fixed.num_fixed

    def _solve_ilp(
        self, graph: ChoiceGraph, seconds: float, name: str, is_bound: bool
    ) -> None:
        search = self.search
        try:
            reduced = reduce(graph, search.pool)
        except Infeasible:
            if is_bound:
                search.raise_bound(self.ceiling)
            return
        if is_small_enough(reduced.graph):
            result = solve_ilp(
                reduced.graph,
                gap=search.gap,
                time_limit_seconds=max(seconds, 0.1),
                cost=search.cost,
            )
            if result.choices is not None:
                self._see(reduced.expand(result.choices))
            if is_bound:
                search.raise_bound(min(result.bound - reduced.slack, self.ceiling))
        search.finish_phase(name, reduced.graph)


def _does_not_fit(
    graph: ChoiceGraph, plans: Sequence[SeenPlan], bound: float
) -> Infeasible:
    peaks = [(graph.peak_bytes(plan.choices), plan.choices) for plan in plans]
    least, choices = min(peaks, default=(inf, None))
    return Infeasible(
        f"every live set must fit the budget {graph.budget:.6g}, but the least known "
        f"to do is {least:.6g} (and nothing below {bound:.6g} can); raise the budget "
        f"to {least:.6g}.",
        least,
        bound,
        choices,
    )
