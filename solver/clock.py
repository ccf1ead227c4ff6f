"""Work counted instead of time, so that no limit depends on the load of the machine.

Every step adds what it did, in seconds that a usual core takes for as much: a rough
figure from the sizes it worked on, but the same everywhere. Only the last resort looks
at the time that passes.
"""

from math import inf
from time import perf_counter


class Clock:
    """Seconds of work `spent`; `last_resort` are the seconds of time to stop after."""

    def __init__(self, last_resort: float = inf) -> None:
        self.spent = 0.0
        self._until = perf_counter() + last_resort

    @property
    def time_left(self) -> float:
        """Seconds of time until the last resort, at least 0."""
        return max(self._until - perf_counter(), 0.0)

    @property
    def is_late(self) -> bool:
        """Whether the last resort was reached: results now depend on the machine."""
        return self.time_left <= 0.0

    def now(self) -> float:
        """The seconds of work spent, or inf once the last resort was reached."""
        return inf if self.is_late else self.spent

    def spend(self, seconds: float) -> None:
        """Adds work."""
        self.spent += seconds

    def __str__(self) -> str:
        return f"Clock: {self.spent:.3f} s of work"
