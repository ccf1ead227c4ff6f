"""Solving within a budget that binds.

The graph is reduced once (kept_choices.py), whatever the prices, and what no plan
within the rows chooses is left out (propagation.py). Then:

  small    the integer program of all that is left (whole.py)
  large    prices on memory from a relaxation of few choices, a bound at these prices
           and the choices it holds likely, in turn (`_price`); a plan among those few;
           whatever costs too much at the prices goes, until what is left is small
  nothing  the least peak of all, in the same way (`_find_least`)

All limits count work. Only at the clock's last resort, for machines that are stuck, do
results depend on time.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible, allowed
from .free import bound_choices
from .kept_choices import KeptChoices
from .likely import beyond_least
from .live_sets import keep_binding
from .memory_rows import MemoryRow, does_not_fit, live_row
from .multipliers import price, price_of_peak
from .propagation import Propagation
from .relaxation import Relaxation, num_pairs
from .search import Search
from .whole import solve_whole

MOST_PAIRS = 45_000
MOST_CHECKS, MOST_CHECKS_OF_PEAK = 300, 100  # of one integer program
SECONDS_OF_FEW = 6.0  # of work, for one of few choices
MOST_LIKELY = 2000
MOST_PRICES = 5
MOST_ATTEMPTS = 3
MOST_CUTS = 10  # times that rows are added to an integer program
TOLERANCE = 4e-6  # of a budget, as HiGHS has one of 1e-6
FIRST_ROWS, ROWS_AT_ONCE = 60, 16
PRICED_GAP, LEAST_PEAK_GAP = 0.1, 5e-3


def solve_within_budget(search: Search, known: Sequence[Sequence[int]]) -> None:
    """Closes the gap of `search.graph`, whose live sets say all about memory.

    `known` are plans within budget or not, the best without the budget among them.
    Raises Infeasible where nothing fits, or nothing was found that does.
    """
    graph = search.graph
    assert graph.budget is not None, "only a budget can bind"
    try:
        binding = keep_binding(graph)
    except Infeasible:
        binding = graph
    rows = [live_row(binding, live) for live in range(len(binding.live_sets))]
    WithinRows(search, rows, allowed(graph.budget)).run(known)


class WithinRows:
    """The search for the cheapest assignment that no row puts above the budget.

    Where none fits and `finds_least`, it ends at the least peak of all, or else once
    that is known to be above the budget.
    """

    def __init__(
        self,
        search: Search,
        rows: Sequence[MemoryRow],
        budget: float,
        *,
        finds_least: bool = True,
    ) -> None:
        self.search, self.budget = search, budget
        self._most_least = inf if finds_least else budget * (1 + LEAST_PEAK_GAP)
        self._gap = search.gap * (1 - 1e-3)  # a little less than is wanted
        self._all_rows = list(rows)
        self._is_active = np.zeros(len(rows), bool)
        self.kept = KeptChoices(search.graph, rows, search.pool)
        self.graph = self.kept.graph
        self.rows: list[MemoryRow] = []  # those of the relaxations, on what is kept
        self._propagation = Propagation(self.graph)
        self._possible = np.ones(self.graph.num_choices, bool)
        self._ceiling = inf  # the least cost of plans of choices that are not possible
        self.bound = -inf
        self.least, self.least_bound = inf, 0.0
        self.least_choices: tuple[int, ...] | None = None

    def run(self, known: Sequence[Sequence[int]]) -> None:
        """Raises the bound and offers plans until the gap is closed or work is done."""
        self.bound = self.search.bound
        for choices in known:
            self._activate(self._see(tuple(choices)), FIRST_ROWS)
        if self._is_closed:
            return
        if not self._narrow():
            self._find_least_of_all()
            raise self._infeasible()
        if num_pairs(self.graph, self._possible) <= MOST_PAIRS:
            self._run_small()
        else:
            self._run_large()
        self.search.raise_bound(self.bound)
        self.search.finish_phase("whole", self.graph)

    def _see(self, choices: tuple[int, ...]) -> np.ndarray:
        """[rows] what a plan of the full graph uses; one that fits is offered."""
        used = np.array([row.used(choices) for row in self._all_rows])
        peak = float(used.max(initial=0.0))
        if peak < self.least:
            self.least, self.least_choices = peak, choices
        if peak <= self.budget:
            self.search.offer(choices)
        return used

    def _activate(self, used: np.ndarray, most: int) -> bool:
        """Gives the relaxations the rows that are used most; whether there were new."""
        order = np.argsort(-used, kind="stable")[:most]
        new = [int(row) for row in order if not self._is_active[row]]
        self._is_active[new] = True
        for row in new:
            self.rows.append(self.kept.row(self._all_rows[row]))
            self._propagation.add_row(self.rows[-1])
        return bool(new)

    def _narrow(self, marginals: Sequence[np.ndarray] | None = None) -> bool:
        """Leaves out what rows do not allow; whether a plan may be left.

        With bounds on the cost of what makes each choice, also what is of no use beside
        the best plan known.
        """
        possible = self._possible
        if marginals is not None and self.search.cost < inf:
            self._ceiling = min(self._ceiling, self._threshold)
            possible &= np.concatenate(marginals) <= self._ceiling + self.kept.slack
        left = self._propagation.left(possible, self.budget)
        self._possible = np.zeros_like(possible) if left is None else left
        return left is not None

    def _run_small(self) -> None:
        bound = self._close(self._possible)
        if self.search.choices is None:
            self.search.finish_phase("first plan", self.graph)
            self._find_least(self._possible)
            if self.search.choices is None:
                self._find_least_of_all()
            if self.search.choices is None:
                raise self._infeasible()
            bound = self._close(self._possible)
        self._raise_bound(bound)

    def _close(self, domain: np.ndarray, seconds: float = inf) -> float:
        """Offers the cheapest plan within a domain; the bound on all of those.

        An integer program ends after so many seconds of work, if it can. The bound may
        be lower than that of a longer search, and none is higher than is of use.
        """
        search, bound, budget = self.search, -inf, self.budget
        for _ in range(MOST_CUTS):
            possible = self._propagation.left(domain, budget)
            if possible is None:
                return inf if budget == self.budget else bound
            program = self._relaxation(possible)
            program.allow(budget)
            enough = search.cutoff if search.cost == inf else self._threshold
            found = solve_whole(
                program,
                gap=self._gap,
                most_checks=MOST_CHECKS,
                most_work=min(seconds, search.seconds_left),
                start=self._known,
                enough=self._enough,
                enough_bound=min(enough, search.cutoff),
            )
            if budget == self.budget:
                bound = max(bound, found.bound)
            if found.choices is None:
                break
            used = self._see(self.kept.expand(found.choices))
            if used.max(initial=0.0) <= self.budget:
                break
            if not self._activate(used, ROWS_AT_ONCE):
                budget *= 1 - TOLERANCE  # it is above by less than HiGHS can tell
        return bound

    def _find_least_of_all(self) -> None:
        """The plan of the least peak, of few choices where all are too many."""
        domain = np.ones(self.graph.num_choices, bool)
        if num_pairs(self.graph, domain) > MOST_PAIRS:
            domain = self._likely(self._known, self._priced_peak(self._known))
        is_small = num_pairs(self.graph, domain) <= MOST_PAIRS
        self._find_least(domain if is_small else self._known)

    def _find_least(self, domain: np.ndarray) -> None:
        """The plan of the least peak within a domain, or any one that fits."""
        for _ in range(MOST_CUTS):
            found = solve_whole(
                self._relaxation(domain, is_of_peak=True),
                gap=LEAST_PEAK_GAP,
                most_checks=MOST_CHECKS_OF_PEAK,
                most_work=self.search.seconds_left,
                enough=self.budget,
                enough_bound=self._most_least,
            )
            if domain.all():
                self.least_bound = max(self.least_bound, found.bound)
            if found.choices is None:
                break
            used = self._see(self.kept.expand(found.choices))
            is_told = used.max(initial=0.0) <= found.bound * (1 + LEAST_PEAK_GAP)
            is_over = self.search.choices is not None or found.bound >= self._most_least
            if is_over or is_told or not self._activate(used, ROWS_AT_ONCE):
                break
        self.search.finish_phase("least bytes", self.graph)

    def _relaxation(self, domain: np.ndarray, is_of_peak: bool = False) -> Relaxation:
        known = self.search.cost if self.search.cost < inf else self.search.bound
        size = max(known - self.graph.constant, 1e-3 * abs(known))
        relaxation = Relaxation(
            self.graph,
            domain,
            self.budget,
            size=size if size < inf else 1.0,
            minimises_peak=is_of_peak,
            clock=self.search.pool.clock,
        )
        for row in self.rows:
            relaxation.add_row(row)
        return relaxation

    def _run_large(self) -> None:
        search = self.search
        start = self._priced(np.zeros(len(self.rows)))[1]
        domain, before = self._likely(self._known, start), None
        for _ in range(MOST_ATTEMPTS):
            domain, marginals = self._price(domain)
            search.finish_phase("prices", self.graph)
            if self._is_closed or self._is_out_of_time():
                break
            if self._close_below(marginals):
                break
            state = domain.tobytes(), search.choices, len(self.rows)
            if state == before:
                break
            before = state
            self._close(domain & self._possible, SECONDS_OF_FEW)
            search.finish_phase("whole few", self.graph)
            if search.choices is None:
                self._find_least(domain)
            if search.choices is None or self._is_closed or self._is_out_of_time():
                continue
            if self._close_below(marginals):
                break
        if search.choices is None:
            raise self._infeasible()

    @property
    def _known(self) -> np.ndarray:
        """Bool [choices]: those of the best plan known, so that among few there is one.

        Else of the one of the least peak.
        """
        choices = self.search.choices or self.least_choices
        if choices is None:
            return np.zeros(self.graph.num_choices, bool)
        return self.kept.made_by(choices)

    def _close_below(self, marginals: Sequence[np.ndarray]) -> bool:
        """Solves what marginals leave, if that is little enough; whether it was."""
        if self.search.cost == inf:
            return False
        if self._narrow(marginals):
            if num_pairs(self.graph, self._possible) > MOST_PAIRS:
                return False
            self._raise_bound(self._close(self._possible))
        else:
            self._raise_bound(inf)
        return True

    def _raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, min(bound, self._ceiling) - self.kept.slack)

    @property
    def _is_closed(self) -> bool:
        cost = self.search.cost
        return cost < inf and cost - self.bound <= self.search.gap * abs(cost)

    @property
    def _enough(self) -> float:
        """The cost of a plan that closes the gap."""
        bound = self.bound
        return bound + self._gap * abs(bound) if bound > -inf else -inf

    @property
    def _threshold(self) -> float:
        return self.search.cost - self._gap * abs(self.search.cost)

    def _price(self, domain: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Raises the bound; returns the domain with likely choices, and the marginals.

        Marginals [k] per node are lower bounds on the cost of what makes each choice.
        """
        search = self.search
        best, kept = -inf, [np.full(n.costs.size, -inf) for n in self.graph.nodes]
        for _ in range(MOST_PRICES):
            relaxed = self._relaxation(domain & self._possible).solve(domain)
            if relaxed is not None and relaxed.value < inf:
                bound, marginals = self._priced(relaxed.prices)
                self._raise_bound(bound)
                if bound > best:
                    best, kept = bound, marginals
                is_best = relaxed.value - best <= PRICED_GAP * search.gap * abs(best)
            else:
                marginals, is_best = self._priced_peak(domain), False
                if self.least_bound > self.budget:
                    raise self._infeasible()
            domain = self._likely(domain, marginals)
            if is_best or self._is_closed or self._is_out_of_time():
                break
        return domain, kept

    def _priced(self, prices: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The bound at prices [rows], and a bound on the cost of each choice."""
        rows = self.rows[: len(prices)]
        left = self._propagation.graph_of(self._possible)
        priced = price(left, rows, prices, self.budget)
        of_interest = self._threshold if self.search.cost < inf else inf
        try:
            return self._bound(priced, of_interest)
        except Infeasible:  # of what is left no two go together
            if self.search.choices is None:
                self._find_least_of_all()
            if self.search.choices is None:
                raise self._infeasible() from None
            return inf, [np.full(node.costs.size, inf) for node in self.graph.nodes]

    def _priced_peak(self, domain: np.ndarray) -> list[np.ndarray]:
        """Bounds on the peak of what makes each choice, at the best prices."""
        relaxed = self._relaxation(domain, is_of_peak=True).solve(domain)
        if relaxed is None or relaxed.value == inf:
            return [np.zeros(node.costs.size) for node in self.graph.nodes]
        prices = relaxed.prices / max(float(relaxed.prices.sum()), 1e-250)
        bound, marginals = self._bound(
            price_of_peak(self.graph, self.rows[: len(prices)], prices), -inf
        )
        self.least_bound = max(self.least_bound, bound)
        return marginals

    def _bound(
        self, priced: ChoiceGraph, of_interest: float
    ) -> tuple[float, list[np.ndarray]]:
        gap = PRICED_GAP * self.search.gap
        inner = Search(priced, gap, self.search.deadline, self.search.pool)
        marginals = bound_choices(inner, of_interest)
        if inner.choices is not None:
            self._activate(self._see(self.kept.expand(inner.choices)), ROWS_AT_ONCE)
        return inner.bound, marginals

    def _likely(
        self, domain: np.ndarray, marginals: Sequence[np.ndarray]
    ) -> np.ndarray:
        """The domain and the choices of least marginal, so many as make it small.

        What it had goes, but for the best plan known, where with it there is no room.
        """
        beyond = np.concatenate([beyond_least(each) for each in marginals])
        order, known = np.sort(beyond), self._known
        for kept in (domain, known):
            number = MOST_LIKELY
            while number > 0:
                most = order[min(number + len(self.graph.nodes), order.size) - 1]
                together = kept | (beyond <= most)
                if num_pairs(self.graph, together) <= MOST_PAIRS:
                    return together
                number //= 2
        return known | (beyond <= 0.0)

    def _is_out_of_time(self) -> bool:
        return self.search.seconds_left <= 0

    def _infeasible(self) -> Infeasible:
        bound = min(self.least_bound, self.least)
        return does_not_fit(self.budget, bound, self.least, self.least_choices)
