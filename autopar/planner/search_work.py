"""What searches within a budget may take together: work counted over all meshes.

Work is counted, not timed (`solver/clock.py`), so that plans do not depend on the
machine. Of several meshes each may take half of what is left, so the first, the one
that others must beat, is searched longest, and a later one never starves.
"""

from __future__ import annotations

from autopar.solver.clock import Clock

MOST_WORK = 90.0  # seconds, of all solutions
GUARD_SECONDS = 1200.0
A_MESH = 0.25  # of what all may take, with which no other mesh is begun


class SearchWork:
    """Seconds of work on a clock that others may share, `most` at most from now on."""

    def __init__(self, most: float | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock(GUARD_SECONDS)
        self.most = MOST_WORK if most is None else most
        self.until = self.clock.spent + self.most

    @property
    def left(self) -> float:
        """Seconds of work until the limit, at least 0."""
        return max(self.until - self.clock.now(), 0.0)

    @property
    def is_little(self) -> bool:
        """Whether so little is left that no other mesh should be begun."""
        return self.left <= A_MESH * self.most

    def half(self) -> SearchWork:
        """Half of what is left, on the same clock."""
        return SearchWork(self.left / 2, self.clock)

    def give_up(self) -> None:
        """Counts what is left as spent, so that nothing else is tried with it."""
        self.clock.spend(self.left)

    def __str__(self) -> str:
        return f"SearchWork: {self.left:.3f} s left"
