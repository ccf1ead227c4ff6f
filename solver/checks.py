"""Limits of HiGHS's integer programs that do not depend on the load of the machine.

HiGHS checks its limits some ten to thirty times a second, within a node of its tree,
too, but in presolve not at all. So work is counted in checks.
"""

from math import inf
from typing import Any

# Seconds of a usual core until a check: of a usual program, and at most.
_CHECKED, _USUAL, _LARGEST = 0.1, 12_000, 18_000


def seconds_of_check(num_variables: int) -> float:
    """Seconds of work until HiGHS checks its limits again, above 0."""
    return _CHECKED * min(max(num_variables, 1), _LARGEST) / _USUAL


class Checks:
    """The checks of one model's run, which ends after `most`."""

    def __init__(self, model: Any, most: float = inf) -> None:
        self.number, self.most = 0, most
        model.cbMipInterrupt.subscribe(self._check)

    def _check(self, event: Any) -> None:
        self.number += 1
        if self.number >= self.most:
            event.interrupt()

    def __str__(self) -> str:
        return f"Checks: {self.number} of {self.most:g}"
