"""Choices of single tensors and operators that are kept, or forbidden, at any price.

Explanations forbid what a plan chose, to see what it would do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    `name` is what errors call them.
    """

    name: str
    specs: Mapping[int, Callable[[Spec], bool]]
    factors: Mapping[int, Callable[[Factors], bool]]

    def applied(self, problem: ShardingProblem) -> ShardingProblem:
        """The problem with every other choice forbidden.

        Raises:
          InfeasiblePlanError: a tensor or operator has no choice left.
        """
        columns = problem.vertices
        seconds = [each.seconds for each in columns.patterns]
        kind = columns.pattern.copy()

        def keep(index: int, kept: np.ndarray) -> None:
            left = self._only(columns[index], seconds[kind[index]], kept)
            kind[index] = len(seconds)
            seconds.append(left)

        for tensor, is_allowed in self.specs.items():
            index, access = problem.writer(tensor)
            distinct = np.array([is_allowed(s) for s in access.choices.distinct])
            keep(index, distinct[access.choices.classes])
        operators = problem.graph.operators()
        for index in np.flatnonzero(columns.row >= 0).tolist() if self.factors else ():
            is_kept = self.factors.get(operators[columns.row[index]].index)
            if is_kept is not None and columns[index].strategies is not None:
                kept = [is_kept(each) for each in strategy_factors(columns[index])]
                keep(index, np.array(kept))
        return problem.with_seconds(seconds, kind)

    def _only(
        self, vertex: Vertex, seconds: np.ndarray, kept: np.ndarray
    ) -> np.ndarray:
        left = np.where(kept, seconds, np.inf)
        if np.isfinite(left).any():
            return left
        raise InfeasiblePlanError(
            f"{vertex.name} must have a choice left, but {self.name} leaves none.",
            tightest_constraint=self.name,
        )


def strategy_factors(vertex: Vertex) -> list[Factors]:
    """The names of the factors of each choice of an operator."""
    assert vertex.strategies is not None
    return [
        tuple(factor.name for factor in vertex.strategies.chosen(row))
        for row in range(len(vertex.seconds))
    ]
