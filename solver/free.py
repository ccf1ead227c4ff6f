"""Solving without a budget: one exact step after another, until the gap is closed.

A graph of equal layers is first solved with few of them (`folded.py`). Otherwise:
in turn reduce; pass messages; fix what costs too much; and where the messages stall,
merge nodes. The ILP gets what is left once nothing can be merged.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from .choice_graph import Infeasible
from .fix import fix
from .folded import solve_folded
from .ilp import is_small_enough, solve_ilp
from .likely import improve_among_likely
from .merge import Merged, choose_pairs, merge_nodes
from .messages import Passing
from .reduce import Reduced, reduce
from .search import Search

FIXED_ENOUGH = 0.3
ROUNDS_AT_ONCE = 30
MOST_MERGED_CHOICES = (1000, 1600)
LEAST_WORK, LEAST_WORK_OF_REST = 0.1, 1.0  # seconds, of an integer program


def solve_free(search: Search, *, folds: bool = False) -> None:
    """Closes the gap of `search.graph`, whose budget is not looked at.

    `folds`: few of many equal layers are looked at first.

    Raises:
        Infeasible: every plan is forbidden.
    """
    if folds:
        solve_folded(search, solve_free)
        if search.is_closed:
            return
    _Descent(search).run()


class _Descent:
    """The way down from the full graph to ever smaller ones.

    `ceiling` is the least cost of the plans left out on the way, so that a bound on the
    graph at hand is one on the full problem up to there; `slack` is its rounding.
    """

    def __init__(self, search: Search) -> None:
        self.search, self.graph = search, search.graph
        self.steps: list[Reduced | Merged] = []
        self.ceiling, self.slack = inf, 0.0
        self.marginals: Sequence[np.ndarray] = ()
        self.seconds = search.seconds_left
        self.in_programs = 0.0

    def _work_of_programs(self, least: float) -> float:
        """Seconds of work of the next integer program, of which all may take half.

        They grow without measure where the choices held likely are not, as where loops
        read stacked values one by one; messages and merging go on in any case.
        """
        left = self.search.seconds_left
        if self.search.choices is None:
            return left  # any plan is of use, or that there is none
        return min(left, max(self.seconds - left - 2 * self.in_programs, least))

    def run(self) -> None:
        try:
            while not self._is_finished():
                pass
        except Infeasible:
            if self.ceiling == inf:
                raise
            self.search.raise_bound(self.ceiling)
            self.search.finish_phase("fix", self.graph)

    def _is_finished(self) -> bool:
        self._reduce()
        self._pass_messages()
        if self.search.is_closed or self.search.seconds_left <= 0:
            return True
        if self._fix() > FIXED_ENOUGH * self.graph.num_choices:
            return False
        self._reduce()
        for most in MOST_MERGED_CHOICES:
            pairs = choose_pairs(self.graph, most)
            if pairs and self.search.seconds_left > self.seconds / 2:
                self._step(merge_nodes(self.graph, pairs, self.search.pool))
                return False
        work_limit = self._work_of_programs(LEAST_WORK_OF_REST)
        if is_small_enough(self.graph, work_limit):
            self._solve_ilp(work_limit)
        return True

    def _step(self, step: Reduced | Merged) -> None:
        self.steps.append(step)
        self.graph = step.graph

    def _expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        for step in reversed(self.steps):
            choices = step.expand(choices)
        return tuple(choices)

    def _raise_bound(self, bound: float) -> None:
        self.search.raise_bound(min(bound - self.slack, self.ceiling))

    @property
    def _enough(self) -> float:
        """A bound on the graph at hand that brings that of the search to its cutoff."""
        return self.search.cutoff + 2 * self.slack

    def _reduce(self) -> None:
        self.search.pool = self.search.pool.unless_full()
        reduced = reduce(self.graph, self.search.pool)
        self._step(reduced)
        self.slack += reduced.slack
        self.search.finish_phase("reduce", self.graph)

    def _pass_messages(self) -> None:
        """Messages and better plans in turn, until the messages stall."""
        search, graph = self.search, self.graph
        passing = Passing(graph, search.cost, clock=search.pool.clock)
        keep = max(search.seconds_left - self.seconds / 4, 0.0)
        while True:
            is_finished = passing.run(
                search.gap,
                cost=search.cost,
                enough=self._enough,
                max_rounds=ROUNDS_AT_ONCE,
                work_limit=search.seconds_left - keep,
            )
            self.marginals = passing.marginals()
            if passing.best is not None:
                search.offer(self._expand(passing.best))
            self._raise_bound(passing.bound)
            search.finish_phase("messages", graph)
            if search.is_closed or search.seconds_left <= keep:
                return
            if passing.best is not None:
                self._improve(passing.best)
            if is_finished or search.is_closed:
                return

    def _improve(self, choices: Sequence[int]) -> None:
        search, start = self.search, self.search.seconds_left
        better = improve_among_likely(
            *(self.graph, choices, self.marginals, search.pool),
            gap=search.gap / 2,
            work_limit=self._work_of_programs(LEAST_WORK),
            cutoff=search.most_useful_cost,
        )
        search.offer(self._expand(better))
        self.in_programs += start - search.seconds_left
        search.finish_phase("likely", self.graph)

    def _fix(self) -> int:
        """Forbids choices that only plans dearer than the best make; how many."""
        threshold = self.search.threshold
        self.ceiling = min(self.ceiling, threshold)
        self.graph, number = fix(self.graph, self.marginals, threshold + self.slack)
        return number

    def _solve_ilp(self, work_limit: float) -> None:
        search = self.search
        result = solve_ilp(
            self.graph,
            gap=search.gap,
            work_limit=work_limit,
            clock=search.pool.clock,
            cost=search.cost,
            cutoff=inf if search.choices is None else self._enough,
        )
        if result.choices is not None:
            search.offer(self._expand(result.choices))
        elif result.bound == self.ceiling == inf:
            raise Infeasible(
                "some assignment must be allowed, but forbidden pairs exclude every "
                "one; allow more choices or pairs."
            )
        self._raise_bound(result.bound)
        search.finish_phase("ilp", self.graph)
