"""A plan that a search within a budget met, and what the model says of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.solver.assignment import Assignment

from ..costs.memory import MemoryProfile


@dataclass(frozen=True, eq=False)
class MetPlan:
    """A plan as an assignment of the problem, and its memory."""

    assignment: Assignment
    profile: MemoryProfile

    @property
    def choices(self) -> tuple[int, ...]:
        return self.assignment.choices

    @cached_property
    def array(self) -> np.ndarray:
        """[nodes] its choices."""
        return np.array(self.choices, np.intp)

    @property
    def peak_bytes(self) -> int:
        """What the compiler needs for it: a plan fits if that is within the budget."""
        return self.profile.peak_bytes

    @property
    def live_bytes(self) -> int:
        """What is live at once, which is what rows tell."""
        return self.profile.live_bytes

    def bytes(self, *, packed: bool) -> int:
        """What rows tell, packed ones or those of what is live."""
        return self.peak_bytes if packed else self.live_bytes

    def __str__(self) -> str:
        return f"MetPlan: cost {self.assignment.cost:.6g}, {self.profile}"
