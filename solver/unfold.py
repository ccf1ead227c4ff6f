"""The way back from a reduced graph: a reduction leaves steps, undone in reverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from . import min_plus


@dataclass(frozen=True, eq=False)
class Drop:
    """A node kept some of its choices."""

    node: int
    kept: np.ndarray

    def undo_choice(self, choices: list[int]) -> None:
        choices[self.node] = int(self.kept[choices[self.node]])


class BestChoice:
    """The best choice of a node, given the classes of its neighbours' choices.

    Of equal ones it is the first that is undominated, as in nodes that are left.
    `sides` are (classes, matrix [classes here, classes there]) of each edge, flattened.
    Asked for few of all combinations, it works them out one by one.
    """

    def __init__(self, costs: np.ndarray, *sides: np.ndarray) -> None:
        self.costs = costs
        self.sides = tuple(zip(sides[::2], sides[1::2], strict=True))
        self._rounding = min_plus.QUANTUM * np.max(costs, where=costs < inf, initial=0)
        self._known: dict[tuple[int, ...], int] = {}

    def given(self, where: tuple[int, ...]) -> int:
        """The best choice where neighbour i makes a choice of class `where[i]`."""
        if where not in self._known:
            total = self.costs
            for (here, matrix), column in zip(self.sides, where, strict=True):
                total = total + matrix[:, column][here]
            best = np.flatnonzero(total <= total.min() + self._rounding)
            if best.size > 1:
                left = best[self._is_undominated[best]]
                best = left if left.size else best
            self._known[where] = int(best[0])
        return self._known[where]

    @cached_property
    def _is_undominated(self) -> np.ndarray:
        usable = np.flatnonzero(self.costs < inf)
        edges = [
            array for here, matrix in self.sides for array in (here[usable], matrix)
        ]
        kept, _ = min_plus.undominated(self.costs[usable], *edges)
        is_kept = np.zeros(self.costs.size, bool)
        is_kept[usable[kept]] = True
        return is_kept


@dataclass(frozen=True, eq=False)
class Fold:
    """A node was minimised out.

    `neighbours` are (node, its classes at the edge) of its at most two edges.
    """

    node: int
    neighbours: tuple[tuple[int, np.ndarray], ...]
    best: BestChoice

    def undo_choice(self, choices: list[int]) -> None:
        where = tuple([int(there[choices[v]]) for v, there in self.neighbours])
        choices[self.node] = self.best.given(where)


Step = Drop | Fold


def unfold_choices(
    steps: Sequence[Step], num_nodes: int, kept: Sequence[int], choices: Sequence[int]
) -> tuple[int, ...]:
    """Choices of the original nodes from those of the nodes `kept`."""
    full = [0] * num_nodes
    for node, choice in zip(kept, choices, strict=False):
        full[node] = int(choice)
    for step in reversed(steps):
        step.undo_choice(full)
    return tuple(full)
