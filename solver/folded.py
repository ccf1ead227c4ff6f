"""Solving a graph of equal layers at the price of a few.

    ring    messages on copies of one layer in a circle give the layers' plan and what
            each costs at least; averaged over the copies they are tied over all layers
    ends    what is left is solved for itself, once with these messages for a bound of
            the full graph, and once beside the layers' plan for a plan of it

(`layers.py`). The bound is one of the full graph whatever the messages are. Where bound
and plan do not meet, nothing is lost but the time, and the full graph is solved.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible
from .descent import Descent
from .layers import Layers, TiedMessages, fold
from .likely import improve_among_likely
from .messages import Passing
from .repeats import find_repeats
from .search import LEAST_GAP, Search

FEWEST_NODES = 1000
ROUNDS_AT_ONCE = 20
MOST_ROUNDS = 120
PART_OF_WORK = 0.5
WORK_AMONG_LIKELY = 1.0  # seconds

SolveEnds = Callable[[Search], None]


def solve_folded(
    search: Search, solve_ends: SolveEnds, fewest_nodes: int = FEWEST_NODES
) -> None:
    """Raises the bound and offers plans of the full graph, if it has equal layers.

    `solve_ends` solves a graph without looking at its layers; smaller graphs than
    `fewest_nodes` are left to it too.
    """
    graph = search.graph
    if len(graph.nodes) < fewest_nodes:
        return
    repeats = find_repeats(graph, search.pool)
    if repeats is None:
        return
    try:
        layers = fold(graph, repeats, search.pool)
        if layers.ring.edges:  # otherwise no message has to be passed
            _Folded(search, layers, solve_ends).run()
    except Infeasible:
        return  # for the layers that were looked at, or all: the full solver tells


class _Folded:
    def __init__(self, search: Search, layers: Layers, solve_ends: SolveEnds) -> None:
        self.search, self.layers, self.solve_ends = search, layers, solve_ends
        self.clock = search.pool.clock
        self.until = self.clock.spent + PART_OF_WORK * search.seconds_left

    def run(self) -> None:
        search, layers = self.search, self.layers
        search.finish_phase("fold", layers.ring)
        passing = Passing(layers.ring, clock=self.clock)
        choices, is_closed = self._pass_messages(passing)
        search.finish_phase("ring", layers.ring)
        if choices is None or not is_closed:
            return
        pattern = layers.pattern(choices)
        bounded = layers.ends_with(TiedMessages.of(layers, passing))
        beside = layers.ends_beside(pattern)
        known = self._solve(bounded, is_bound=True)
        if known is not None:
            self._offer(Descent(beside).improve(known), pattern)
        search.finish_phase("ends", bounded)
        if not search.is_closed:
            self._offer(self._solve(beside, is_bound=False), pattern)
            search.finish_phase("plan", beside)

    def _pass_messages(self, passing: Passing) -> tuple[tuple[int, ...] | None, bool]:
        """Messages on the ring; its best plan, and whether the bound meets it."""
        best, cost, is_closed = None, np.inf, False
        gap = max(self.search.gap / 4, LEAST_GAP)
        while passing.num_rounds < MOST_ROUNDS:
            is_finished = passing.run(
                gap,
                cost=cost,
                max_rounds=ROUNDS_AT_ONCE,
                work_limit=self.until - self.clock.spent,
            )
            if is_new := passing.best_cost < cost:
                best, cost = passing.best, passing.best_cost
            is_open = cost - passing.bound > gap * abs(cost)
            if best is not None and is_open and (is_new or is_finished):
                best = improve_among_likely(
                    *(self.layers.ring, best, passing.marginals(), self.search.pool),
                    gap=gap,
                    work_limit=WORK_AMONG_LIKELY,
                    most_choices=len(self.layers.ring.nodes),
                )
                cost = self.layers.ring.cost(best)
            is_closed = cost < np.inf and cost - passing.bound <= gap * abs(cost)
            if is_closed or is_finished or self.clock.now() > self.until:
                break
        return best, is_closed

    def _solve(self, graph: ChoiceGraph, is_bound: bool) -> tuple[int, ...] | None:
        """A plan of the ends; its bound is one of the full graph with the messages."""
        cutoff = self.search.cutoff if is_bound else np.inf
        search = Search(
            graph, self.search.gap / 4, self.until, self.search.pool, cutoff
        )
        self.solve_ends(search)
        if is_bound:
            self.search.raise_bound(search.bound)
        return search.choices

    def _offer(
        self, choices: Sequence[int] | None, pattern: Sequence[np.ndarray]
    ) -> None:
        if choices is not None:
            self.search.offer(self.layers.expand(choices, pattern).tolist())
