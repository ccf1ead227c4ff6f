"""Choices of single tensors and operators that are kept, or forbidden, at any price.

Explanations forbid what a plan chose, to see what it would do instead; a plan that is
made like another keeps what the other chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InfeasiblePlanError
from ..sharding.spec import Spec
from .sharding_problem import ShardingProblem
from .vertices import Vertex

Factors = tuple[str, ...]  # of an operator, by mesh axis


@dataclass(frozen=True)
class ChoicePins:
    """What some tensors may be made in, and how some operators may be split.

    `specs` are tests of the spec by tensor, `factors` tests of the factors by operator.
    `name` is what errors call them. A hint is ignored where it leaves no choice.
    """

    name: str
    specs: Mapping[int, Callable[[Spec], bool]]
    factors: Mapping[int, Callable[[Factors], bool]]
    is_hint: bool = False

    def applied(self, problem: ShardingProblem) -> ShardingProblem:
        """The problem with every other choice forbidden.

        Raises:
          InfeasiblePlanError: a tensor or operator has no choice left.
        """
        vertices = list(problem.vertices)
        for tensor, is_allowed in self.specs.items():
            index, access = problem.writers[tensor]
            distinct = np.array([is_allowed(s) for s in access.choices.distinct])
            kept = distinct[access.choices.classes]
            vertices[index] = self._only(vertices[index], kept)
        for index, vertex in enumerate(vertices):
            is_kept = self.factors.get(
                -1 if vertex.operator is None else vertex.operator
            )
            if is_kept is not None and vertex.strategies is not None:
                kept = [is_kept(factors) for factors in strategy_factors(vertex)]
                vertices[index] = self._only(vertex, np.array(kept))
        return problem.with_vertices(vertices)

    def _only(self, vertex: Vertex, kept: np.ndarray) -> Vertex:
        seconds = np.where(kept, vertex.seconds, np.inf)
        if not np.isfinite(seconds).any():
            if self.is_hint:
                return vertex
            raise InfeasiblePlanError(
                f"{vertex.name} must have a choice left, but {self.name} leaves none.",
                tightest_constraint=self.name,
            )
        return replace(vertex, seconds=seconds)


def strategy_factors(vertex: Vertex) -> list[Factors]:
    """The names of the factors of each choice of an operator."""
    assert vertex.strategies is not None
    return [
        tuple(factor.name for factor in vertex.strategies.chosen(row))
        for row in range(len(vertex.seconds))
    ]
