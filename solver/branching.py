"""Branch and bound on the linear relaxation, by what decides most: who holds memory.

Between rows of memory a relaxation mixes few nodes, those that hold much in one choice
and little in another. To allow only the small or only the large choices of such a node
moves the value a lot. So of each such node both halves are tried (`_halves`), and

  - a half whose value is beyond the threshold is given up for good: no branch at all;
  - else the node whose worse half is the dearest is branched on, its better half first,
    so that complete assignments are met early (a plunge).

A complete assignment is shown to `Judge`, which may answer with rows that it breaks:
they join the relaxation and its value is asked for again. The choices that relaxations
met are few and good: `Improve` looks for a better assignment among those alone. All
limits count work, never seconds, so that equal problems have equal results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from .relaxation import Relaxation, Relaxed
from .search import LEAST_GAP

CANDIDATES = 6
FIRST_CANDIDATES = 2  # as long as no assignment is known
WHOLE = 1 - 1e-6
MOST_SOLVES = 600
MOST_PIVOTS = 150_000
MOST_PLUNGES = 60
FIRST_IMPROVEMENT = 4  # after so many solves, then twice as many each time


@dataclass(frozen=True)
class Judged:
    """Of a complete assignment: its value, inf if it is not allowed.

    `is_cut`: rows that it breaks were added to the relaxation.
    """

    value: float
    is_cut: bool = False


Judge = Callable[[tuple[int, ...], float], Judged]
"""Asked about a complete assignment and the relaxation's value of it."""

Improve = Callable[[np.ndarray], float]
"""Looks among some choices (bool [choices]); the best value known then."""


@dataclass(frozen=True)
class Tree:
    """What was found: no assignment of the relaxation's is below `bound`.

    `choices`, of `value`, is the best allowed one met (None: none better than known).
    """

    bound: float
    value: float
    choices: tuple[int, ...] | None
    num_solves: int

    def __str__(self) -> str:
        return f"Tree: bound {self.bound:.6g}, value {self.value:.6g}"


@dataclass(frozen=True, eq=False)
class _Half:
    domain: np.ndarray
    relaxed: Relaxed


def branch_and_bound(
    relaxation: Relaxation,
    domain: np.ndarray,
    judge: Judge,
    *,
    gap: float,
    value: float = inf,
    candidates: int = CANDIDATES,
    most_solves: int = MOST_SOLVES,
    improve: Improve | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Tree:
    """The best allowed assignment within a domain, to a relative gap if work allows.

    Args:
        relaxation: the program, to which rows are added.
        domain: bool [choices].
        judge: says whether a complete assignment is allowed.
        gap: relative distance of bound to value at which to stop.
        value: that of an assignment already known.
        candidates: nodes of which both halves are tried at each branch.
        most_solves: most linear programs solved.
        improve: asked now and then about the choices met so far.
        is_over: says that more work is of no use.
    """
    tree = _Tree(relaxation, judge, gap, value, is_over)
    tree.candidates, tree.improve = candidates, improve
    tree.last_solve = relaxation.num_solves + most_solves
    return tree.run(domain)


class _Tree:
    def __init__(
        self,
        relaxation: Relaxation,
        judge: Judge,
        gap: float,
        value: float,
        is_over: Callable[[], bool],
    ) -> None:
        self.relaxation, self.judge, self.gap = relaxation, judge, gap
        self.value, self.choices = value, None
        self.is_over = is_over
        self.candidates = CANDIDATES
        self.improve: Improve | None = None
        self.last_solve, self.last_pivot = 0, relaxation.num_pivots + MOST_PIVOTS
        self.met = np.zeros(relaxation.domain.size, bool)
        self.next_improvement = relaxation.num_solves + FIRST_IMPROVEMENT
        self.starts = relaxation.starts
        self.order = count()
        self.open: list[tuple[float, int, np.ndarray]] = []
        self.lost = inf  # the least value of what was left alone at a limit

    @property
    def threshold(self) -> float:
        if self.value == inf:
            return inf
        return self.value - max(self.gap, LEAST_GAP / 2) * abs(self.value)

    @property
    def is_exhausted(self) -> bool:
        return (
            self.relaxation.num_solves >= self.last_solve
            or self.relaxation.num_pivots >= self.last_pivot
            or self.is_over()
        )

    def run(self, domain: np.ndarray) -> Tree:
        first = self.relaxation.num_solves
        heappush(self.open, (-inf, next(self.order), domain))
        while self.open and self.open[0][0] < self.threshold and not self.is_exhausted:
            bound, _, part = heappop(self.open)
            self._plunge(bound, part)
        bound = min([self.lost, self.threshold, *(each[0] for each in self.open)])
        solves = self.relaxation.num_solves - first
        return Tree(min(bound, self.value), self.value, self.choices, solves)

    def _plunge(self, bound: float, domain: np.ndarray) -> None:
        relaxed, shown = self._solve(domain), None
        for _ in range(MOST_PLUNGES):
            if relaxed is None or (
                relaxed.value < self.threshold and self.is_exhausted
            ):
                self._leave(bound if relaxed is None else max(bound, relaxed.value))
                return
            if relaxed.value >= self.threshold:
                return
            bound = max(bound, relaxed.value)
            domain = domain & (relaxed.excess <= self.threshold - relaxed.value)
            mixed = self._mixed(relaxed)
            if not mixed:
                choices = self._choices(relaxed)
                judged = self.judge(choices, relaxed.value)
                if judged.value < self.value:
                    self.value, self.choices = judged.value, choices
                if not judged.is_cut or choices == shown:
                    if judged.value > relaxed.value + 1e-6 * abs(relaxed.value):
                        self._leave(bound)
                    return
                relaxed, shown = self._solve(domain), choices
                continue
            num_rows = len(self.relaxation.rows)
            halves = self._branch(domain, relaxed, mixed)
            if not halves:
                return
            for other in halves[1:]:
                value = max(bound, other.relaxed.value)
                heappush(self.open, (value, next(self.order), other.domain))
            domain, relaxed = halves[0].domain, halves[0].relaxed
            if len(self.relaxation.rows) > num_rows:
                relaxed = self._solve(domain)
        heappush(self.open, (bound, next(self.order), domain))

    def _solve(self, domain: np.ndarray) -> Relaxed | None:
        relaxed = self.relaxation.solve(domain, self.threshold)
        if relaxed is not None and relaxed.shares.size:
            self.met |= relaxed.shares > 1e-6
        return relaxed

    def _improve(self) -> None:
        """Looks among the choices met, if it is time to."""
        solves = self.relaxation.num_solves
        if self.improve is None or solves < self.next_improvement:
            return
        self.next_improvement = 2 * solves
        self.value = min(self.value, self.improve(self.met))

    def _leave(self, bound: float) -> None:
        self.lost = min(self.lost, bound)

    def _choices(self, relaxed: Relaxed) -> tuple[int, ...]:
        parts = np.split(relaxed.shares, self.starts[1:-1])
        return tuple(int(part.argmax()) for part in parts if part.size)

    def _mixed(self, relaxed: Relaxed) -> list[int]:
        """Nodes that are not decided, those that mix the most memory first."""
        most = np.maximum.reduceat(relaxed.shares, self.starts[:-1])
        nodes = self.relaxation.graph.nodes
        ranked = []
        for node in np.flatnonzero(most < WHOLE).tolist():
            shares = relaxed.shares[self.starts[node] : self.starts[node + 1]]
            held = nodes[node].bytes[shares > 1e-6]
            rest = 1 - float(most[node])
            ranked.append((-float(np.ptp(held)) * min(rest, 0.5), -rest, node))
        return [node for *_, node in sorted(ranked)]

    def _branch(
        self, domain: np.ndarray, relaxed: Relaxed, mixed: list[int]
    ) -> list[_Half]:
        """The parts of the domain that are left, the better one first.

        One part where all else is beyond the threshold, none where everything is.
        """
        tried: list[list[_Half]] = []
        number = FIRST_CANDIDATES if self.value == inf else self.candidates
        for node in mixed[:number]:
            tried.append(self._try(node, domain, relaxed))
            if len(tried[-1]) < 2 or self.is_exhausted:
                return tried[-1]
        self._improve()
        for halves in tried:
            left = [half for half in halves if half.relaxed.value < self.threshold]
            if len(left) < 2:
                return left

        def score(halves: list[_Half]) -> float:
            low, high = (half.relaxed.value - relaxed.value for half in halves)
            return low + 0.1 * high

        return max(tried, key=score)

    def _try(self, node: int, domain: np.ndarray, relaxed: Relaxed) -> list[_Half]:
        """The halves of a node that are below the threshold, the better one first."""
        halves = []
        for part in self._halves(node, domain, relaxed):
            found = self._solve(part)
            if found is None:
                self._leave(relaxed.value)
            elif found.value < self.threshold:
                halves.append(_Half(part, found))
        return sorted(halves, key=lambda half: half.relaxed.value)

    def _halves(
        self, node: int, domain: np.ndarray, relaxed: Relaxed
    ) -> list[np.ndarray]:
        """Small and large choices of a node, or the likeliest and the others."""
        own = slice(self.starts[node], self.starts[node + 1])
        shares, held = relaxed.shares[own], self.relaxation.graph.nodes[node].bytes
        chosen = shares > 1e-6
        mean = float((shares * held).sum() / shares.sum())
        is_low = held <= mean
        if np.ptp(held[chosen]) <= 1e-9 * held.max(initial=0.0):
            is_low = np.arange(held.size) == shares.argmax()
        parts = []
        for side in (is_low, ~is_low):
            part = domain.copy()
            part[own] &= side
            if part[own].any():
                parts.append(part)
        return parts
