"""The plans that use a mesh of several axes as if it had one.

A dim is split over all axes or none, so there are as many choices as on one axis. Such
plans are some of those of the whole problem, and a search within a budget that has few
choices finds them where one that has many ends before it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..planner.sharding_problem import ShardingProblem
from ..planner.vertices import Pattern
from ..sharding.spec import dims_of


@dataclass(frozen=True)
class AxesTogether:
    """Every tensor is split by all mesh axes alike, where it is read and made.

    What has no such choice, as an operator that must be split but has no dim that all
    axes divide, keeps all it has.
    """

    name: str = "all axes together"

    def applied(self, problem: ShardingProblem) -> ShardingProblem:
        """The problem with every other choice forbidden."""
        known: dict[int, np.ndarray] = {}
        patterns = problem.vertices.patterns
        seconds = [_together(pattern, known) for pattern in patterns]
        return problem.with_seconds(seconds, problem.vertices.pattern)


def _together(pattern: Pattern, known: dict[int, np.ndarray]) -> np.ndarray:
    alike = np.ones(len(pattern.seconds), bool)
    for choices in (*pattern.writes, *pattern.reads):
        if id(choices) not in known:
            dims = dims_of(choices.specs)
            known[id(choices)] = (dims == dims[:, :1]).all(axis=1)
        alike &= known[id(choices)]
    seconds = np.where(alike, pattern.seconds, np.inf)
    return seconds if np.isfinite(seconds).any() else pattern.seconds
