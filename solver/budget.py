"""Solving within a budget that binds.

The graph is reduced once (kept_choices.py). Then, with rows of memory that come as they
are broken (memory_rows.py):

  small    the linear relaxation of all that is left, and branching (`_close`)
  large    prices on memory from a relaxation of few choices, a bound at these prices
           and the choices it holds likely, in turn (`_price`); a plan among those few;
           whatever costs too much at the prices goes, until what is left is small
  nothing  the least peak of all, in the same way (`_find_least`)

All limits count work. Only if the time of the search is up, which is meant for machines
that are stuck, results depend on it.
"""

import logging
from collections.abc import Sequence
from math import inf

import numpy as np

from .branching import Judged, Tree, branch_and_bound
from .choice_graph import ChoiceGraph, Infeasible, allowed
from .free import bound_choices
from .kept_choices import KeptChoices
from .memory_rows import (
    Check,
    MemoryRow,
    Verdict,
    check_live_sets,
    exclusion,
    most_spread,
)
from .multipliers import price, price_of_peak
from .relaxation import Relaxation, num_pairs
from .search import Search

MOST_PAIRS = 45_000
MOST_LIKELY = 2000
MOST_SOLVES, MOST_INNER_SOLVES = 300, 250
MOST_PRICES = 5
MOST_ATTEMPTS = 3
MOST_SET_UPS = 6
ROUNDING = 1e-4  # of a peak: by less no row is refuted
LARGE = 0.004  # of the budget: what differs by so much is kept from the start
PRICED_GAP = 0.1
LEAST_PEAK_GAP = 5e-3
GUARD_SECONDS = 600.0
_log = logging.getLogger("autopar")


def solve_within_budget(search: Search, known: Sequence[Sequence[int]]) -> None:
    """Closes the gap of `search.graph`, whose live sets say all about memory.

    `known` are plans within budget or not, the best without the budget among them.

    Raises:
        Infeasible: nothing fits, or nothing was found that does.
    """
    graph = search.graph
    assert graph.budget is not None, "only a budget can bind"
    members = {node for live in graph.live_sets for node in live}
    held = [v for v in most_spread(graph, 0.0) if v in members]
    check = check_live_sets(graph)
    BudgetSearch(search, allowed(graph.budget), check, held).run(known)


class BudgetSearch:
    """The search for the cheapest assignment that a check accepts.

    Args:
        search: the problem; what is accepted is offered to it.
        budget: what the check's peak may be.
        check: the word on memory; asked once about each assignment.
        held: nodes whose bytes matter to rows; the others count at their least.
    """

    def __init__(
        self, search: Search, budget: float, check: Check, held: Sequence[int]
    ) -> None:
        self.search, self.budget = search, budget
        self._check, self._held = check, frozenset(held)
        most = {v: float(np.ptp(search.graph.nodes[v].bytes)) for v in held}
        self._large = {v for v, spread in most.items() if spread >= LARGE * budget}
        self._verdicts: dict[tuple[int, ...], Verdict] = {}
        self._full_rows: list[MemoryRow] = []
        self._origin: dict[int, tuple[int, ...]] = {}  # by id of rows, which are kept
        self._is_set_up = False
        self._is_blunt = self._is_stale = False
        self.least, self.least_bound = inf, 0.0
        self.least_choices: tuple[int, ...] | None = None

    def run(self, known: Sequence[Sequence[int]]) -> None:
        """Raises the bound and offers plans until the gap is closed or work is done.

        Raises:
            Infeasible: nothing fits, or nothing was found that does.
        """
        for choices in known:
            self.ask(tuple(choices))
        for attempt in range(MOST_SET_UPS):
            if self.search.is_closed or self._is_out_of_time():
                break
            self._set_up()
            try:
                self._run()
            except Infeasible:
                if not self._is_unfinished or attempt == MOST_SET_UPS - 1:
                    raise
            if not self._is_unfinished:
                break
        self._warn_if_out_of_time()

    @property
    def _is_unfinished(self) -> bool:
        """Whether the rows at hand were found to say too little or too much."""
        return self._is_blunt or self._is_stale

    def _set_up(self) -> None:
        """Reduces the graph, but for the nodes that the rows met so far name."""
        self._lower_refuted()
        named = {node for row in self._full_rows for node in row.nodes}
        held = sorted(self._held & (named | self._large))
        self.kept = KeptChoices(self.search.graph, held, self.search.pool)
        self._is_set_up = True
        self.graph = self.kept.graph
        self.rows = [self.kept.row(row) for row in self._full_rows]
        self._met = np.zeros(self.graph.num_choices, bool)
        self._is_blunt = self._is_stale = False
        self.least_bound, self.bound = 0.0, self.search.bound

    def _run(self) -> None:
        everything = np.ones(self.graph.num_choices, bool)
        if num_pairs(self.graph, everything) <= MOST_PAIRS:
            self._run_small(everything)
        else:
            self._run_large(everything)

    def ask(self, choices: tuple[int, ...]) -> Verdict:
        """What the check says of a plan of the full graph; one that fits is offered."""
        if choices in self._verdicts:
            return self._verdicts[choices]
        verdict = self._check(choices)
        self._verdicts[choices] = verdict
        if verdict.peak < self.least:
            self.least, self.least_choices = verdict.peak, choices
        if verdict.peak <= self.budget:
            self.search.offer(choices)
        self._is_stale |= any(
            row.used(choices) > verdict.peak * (1 + ROUNDING) for row in self._full_rows
        )
        for row in verdict.rows:
            if id(row) not in self._origin:
                sound = self._sound(row, choices)
                self._origin.update({id(each): choices for each in (row, *sound)})
                self._full_rows += sound
        if self._is_set_up:
            new = self._full_rows[len(self.rows) :]
            self.rows += map(self.kept.row, new)
        return verdict

    def _sound(self, row: MemoryRow, choices: tuple[int, ...]) -> list[MemoryRow]:
        """A row, lowered as far as the plans asked about refute it.

        If it then lets its own plan pass, these choices are excluded besides.
        """
        excess = [row.used(other) - each.peak for other, each in self._verdicts.items()]
        own = self._verdicts[choices].peak
        beyond = max(excess, default=0.0)
        if beyond <= ROUNDING * own:
            return [row]
        lowered = MemoryRow(row.nodes, row.weights, row.constant - beyond)
        if own > self.budget >= own - beyond:
            return [lowered, exclusion(row, choices, own)]
        return [lowered]

    def _lower_refuted(self) -> None:
        """Lowers the rows that say more of some plan than the check does."""
        rows = []
        for row in self._full_rows:
            origin = self._origin[id(row)]
            sound = self._sound(row, origin)
            self._origin.update({id(each): origin for each in sound})
            rows += sound
        self._full_rows = rows

    def _run_small(self, everything: np.ndarray) -> None:
        if self.search.choices is None:
            self._find_least(everything, is_whole=True)
        if self.search.choices is None and self.least_bound <= self.budget:
            self._close(everything)
            self.search.finish_phase("first plan", self.graph)
        if self.search.choices is None:
            raise self._does_not_fit()
        tree = self._close(everything)
        if self._is_stale:
            return
        self._raise_bound(tree.bound)
        self.search.raise_bound(self.bound)
        self.search.finish_phase("branch", self.graph)

    def _close(self, domain: np.ndarray) -> Tree:
        """The cheapest plan within a domain, and a bound on all of those."""
        return self._branch(self.kept, domain, MOST_SOLVES, is_of_peak=False)

    def _find_least(self, domain: np.ndarray, is_whole: bool) -> None:
        """The plan of the least peak within a domain, or one that fits, with a bound."""
        tree = self._branch(self.kept, domain, MOST_SOLVES, is_of_peak=True)
        if is_whole:
            self.least_bound = max(self.least_bound, tree.bound)
        self.search.finish_phase("least bytes", self.graph)

    def _branch(
        self,
        kept: KeptChoices,
        domain: np.ndarray,
        most_solves: int,
        *,
        is_of_peak: bool,
    ) -> Tree:
        """Branch and bound, now and then among the choices met alone."""
        relaxation = self._relaxation(kept, domain, is_of_peak)
        is_inner = kept is not self.kept

        def judge(choices: tuple[int, ...], value: float) -> Judged:
            full = self._full(kept, choices)
            verdict = self.ask(full)
            limit = self.budget
            if is_of_peak:
                limit = max(limit, value + LEAST_PEAK_GAP / 2 * abs(value))
            own = verdict.peak if is_of_peak else self.search.graph.cost(full)
            if verdict.peak <= limit:
                return Judged(own)
            is_cut = self._is_cut(kept, verdict, choices, limit)
            self._add_rows(kept, relaxation)
            return Judged(own if is_of_peak else inf, is_cut)

        def improve(met: np.ndarray) -> float:
            self._met |= met
            few = self.kept.among(self._met & domain, self.search.pool)
            everything = np.ones(few.graph.num_choices, bool)
            most = MOST_INNER_SOLVES
            self._branch(few, everything, most, is_of_peak=is_of_peak)
            self._add_rows(kept, relaxation)
            return self.least if is_of_peak else self.search.cost

        return branch_and_bound(
            relaxation,
            domain,
            judge,
            gap=LEAST_PEAK_GAP if is_of_peak else self.search.gap * (1 - 1e-3),
            value=self.least if is_of_peak else self.search.cost,
            candidates=2 if is_inner else 6,
            most_solves=most_solves,
            improve=None if is_inner else improve,
            is_over=lambda: self._is_over,
        )

    def _full(self, kept: KeptChoices, choices: Sequence[int]) -> tuple[int, ...]:
        if kept is not self.kept:
            choices = kept.expand(choices)
        return self.kept.expand(choices)

    def _relaxation(
        self, kept: KeptChoices, domain: np.ndarray, is_of_peak: bool = False
    ) -> Relaxation:
        known = self.search.cost if self.search.cost < inf else self.search.bound
        size = max(known - kept.graph.constant, 1e-3 * abs(known))
        relaxation = Relaxation(
            kept.graph,
            domain,
            self.budget,
            size=size if size < inf else 1.0,
            minimises_peak=is_of_peak,
        )
        self._add_rows(kept, relaxation)
        return relaxation

    def _add_rows(self, kept: KeptChoices, relaxation: Relaxation) -> None:
        """Adds the rows that came since the last time."""
        for row in self.rows[len(relaxation.rows) :]:
            relaxation.add_row(row if kept is self.kept else kept.row(row))

    def _is_cut(
        self,
        kept: KeptChoices,
        verdict: Verdict,
        choices: tuple[int, ...],
        limit: float,
    ) -> bool:
        """Whether a row says of a plan of `kept` that it needs more than a limit."""
        rows = self.rows if kept is self.kept else map(kept.row, self.rows)
        is_cut = any(row.used(choices) > limit for row in rows)
        self._is_blunt |= not is_cut
        return is_cut

    def _run_large(self, everything: np.ndarray) -> None:
        search = self.search
        start = self._priced(np.zeros(len(self.rows)))[1]
        domain = self._likely(everything, start)
        for _ in range(MOST_ATTEMPTS):
            domain, marginals = self._price(domain)
            search.finish_phase("prices", self.graph)
            if self._is_closed or self._is_over:
                break
            if search.choices is None:
                self._find_least(domain, is_whole=False)
            self._close(domain)
            search.finish_phase("branch few", self.graph)
            if search.choices is None or self._is_closed or self._is_over:
                continue
            threshold = self._threshold
            left = np.concatenate(marginals) <= threshold + self.kept.slack
            if num_pairs(self.graph, left) <= MOST_PAIRS:
                self._raise_bound(min(self._close(left).bound, threshold))
                break
        if self._is_stale:
            return
        if search.choices is None:
            raise self._does_not_fit()
        search.raise_bound(self.bound)
        search.finish_phase("branch", self.graph)

    def _raise_bound(self, bound: float) -> None:
        """Notes a bound, which holds if none of the rows at hand is refuted later."""
        self.bound = max(self.bound, bound - self.kept.slack)

    @property
    def _is_closed(self) -> bool:
        cost = self.search.cost
        return cost < inf and cost - self.bound <= self.search.gap * abs(cost)

    @property
    def _is_over(self) -> bool:
        return self._is_out_of_time()

    @property
    def _threshold(self) -> float:
        return self.search.cost - self.search.gap * (1 - 1e-3) * abs(self.search.cost)

    def _price(self, domain: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Raises the bound; returns the domain with likely choices, and the marginals.

        Marginals [k] per node are lower bounds on the cost of what makes each choice.
        """
        search = self.search
        best, kept = -inf, [np.full(n.costs.size, -inf) for n in self.graph.nodes]
        for _ in range(MOST_PRICES):
            relaxed = self._relaxation(self.kept, domain).solve(domain)
            if relaxed is not None and relaxed.value < inf:
                bound, marginals = self._priced(relaxed.prices)
                self._raise_bound(bound)
                if bound > best:
                    best, kept = bound, marginals
                is_best = relaxed.value - best <= PRICED_GAP * search.gap * abs(best)
            else:
                marginals, is_best = self._priced_peak(domain), False
            domain = self._likely(domain, marginals)
            if is_best or self._is_closed or self._is_over:
                break
        return domain, kept

    def _priced(self, prices: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The bound at prices [rows], and a bound on the cost of each choice."""
        rows = self.rows[: len(prices)]
        priced = price(self.graph, rows, prices, self.budget)
        return self._bound(priced, self._threshold if self.search.cost < inf else inf)

    def _priced_peak(self, domain: np.ndarray) -> list[np.ndarray]:
        """Bounds on the peak of what makes each choice, at the best prices."""
        relaxed = self._relaxation(self.kept, domain, True).solve(domain)
        if relaxed is None or relaxed.value == inf:
            return [np.zeros(node.costs.size) for node in self.graph.nodes]
        prices = relaxed.prices / max(float(relaxed.prices.sum()), 1e-250)
        bound, marginals = self._bound(
            price_of_peak(self.graph, self.rows[: len(prices)], prices), -inf
        )
        self.least_bound = max(self.least_bound, bound)
        if self.least_bound > self.budget:
            raise self._does_not_fit()
        return marginals

    def _bound(
        self, priced: ChoiceGraph, of_interest: float
    ) -> tuple[float, list[np.ndarray]]:
        gap = PRICED_GAP * self.search.gap
        inner = Search(priced, gap, self.search.deadline, self.search.pool)
        marginals = bound_choices(inner, of_interest)
        if inner.choices is not None:
            self.ask(self.kept.expand(inner.choices))
        return inner.bound, marginals

    def _likely(
        self, domain: np.ndarray, marginals: Sequence[np.ndarray]
    ) -> np.ndarray:
        """The domain and the choices of least marginal, so many as make it small."""
        beyond = np.concatenate([each - each.min() for each in marginals])
        order = np.sort(beyond)
        number = MOST_LIKELY + len(self.graph.nodes)
        small = domain if num_pairs(self.graph, domain) <= MOST_PAIRS else None
        while number > len(self.graph.nodes):
            chosen = beyond <= order[min(number, order.size) - 1]
            together = chosen if small is None else chosen | small
            if num_pairs(self.graph, together) <= MOST_PAIRS:
                return together
            number = len(self.graph.nodes) + (number - len(self.graph.nodes)) // 2
        return beyond <= 0.0 if small is None else small

    def _is_out_of_time(self) -> bool:
        return self.search.seconds_left <= 0

    def _warn_if_out_of_time(self) -> None:
        if self._is_out_of_time() and not self.search.is_closed:
            _log.warning(
                "the time for a plan within its budget was up before the work was: the "
                "plan has a gap and depends on the machine; give it more time."
            )

    def _does_not_fit(self) -> Infeasible:
        budget, least, bound = (
            self.budget,
            self.least,
            min(self.least_bound, self.least),
        )
        return Infeasible(
            f"every plan must fit the budget {budget:.6g}, but none can below "
            f"{bound:.6g}, and the least found to do is {least:.6g}; raise the budget "
            f"to {least:.6g}.",
            least,
            bound,
            self.least_choices,
        )
