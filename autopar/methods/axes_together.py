"""The plans that use a mesh of several axes as if it had one.

A dim is split over all axes or none, so there are as many choices as on one axis. Such
plans are some of those of the whole problem, and a search within a budget that has few
choices finds them where one that has many ends before it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..planner.sharding_problem import ShardingProblem
from ..planner.spec_choices import SpecChoices
from ..planner.vertices import Vertex
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
        vertices = [_together(vertex, known) for vertex in problem.vertices]
        return problem.with_vertices(vertices)


def _together(vertex: Vertex, known: dict[int, np.ndarray]) -> Vertex:
    alike = np.ones(len(vertex.seconds), bool)
    for choices in _choices(vertex):
        if id(choices) not in known:
            dims = dims_of(choices.specs)
            known[id(choices)] = (dims == dims[:, :1]).all(axis=1)
        alike &= known[id(choices)]
    seconds = np.where(alike, vertex.seconds, np.inf)
    return replace(vertex, seconds=seconds) if np.isfinite(seconds).any() else vertex


def _choices(vertex: Vertex) -> Iterator[SpecChoices]:
    for access in (*vertex.writes, *vertex.reads):
        yield access.choices
