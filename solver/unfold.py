"""The way back from a reduced graph: for choices, and for bounds on each choice.

A reduction leaves a trail of steps, undone in reverse. Undoing one gives a node its
choice. It also gives a bound on the *excess* of each choice: what every assignment that
makes it costs beyond the bound of the whole. If x at a node costs d(y) more than the
best choice there, given choices y of its neighbours, then an assignment with x and y
costs d(y) more than one that we have a bound for, which is at least the largest excess
of any y. So excess(x) = min over y of (d(y) + max excess(y)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from . import min_plus

MOST_ENTRIES = 2_000_000


@dataclass(frozen=True, eq=False)
class Drop:
    """A node kept some of its choices.

    `replacement` [dropped, kept] is the most it can cost to use a kept choice in place
    of a dropped one (inf where unknown), None if the dropped were forbidden.
    """

    node: int
    kept: np.ndarray
    num_choices: int
    replacement: np.ndarray | None

    def undo_choice(self, choices: list[int]) -> None:
        choices[self.node] = int(self.kept[choices[self.node]])

    def undo_excess(self, excess: list[np.ndarray]) -> None:
        before = np.full(self.num_choices, inf)
        if self.replacement is not None:
            is_known = np.isfinite(self.replacement)
            after = excess[self.node] - np.where(is_known, self.replacement, 0.0)
            is_dropped = np.ones(self.num_choices, bool)
            is_dropped[self.kept] = False
            before[is_dropped] = np.max(after, axis=1, where=is_known, initial=0.0)
        before[self.kept] = excess[self.node]
        excess[self.node] = before


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
        kept, _, _ = min_plus.undominated_of_many(self.costs[usable], None, *edges)
        is_kept = np.zeros(self.costs.size, bool)
        is_kept[usable[kept]] = True
        return is_kept


@dataclass(frozen=True, eq=False)
class Fold:
    """A node was minimised out.

    `neighbours` are (node, its classes, matrix [classes here, classes there], classes
    there) of its at most two edges; `values` is the least cost by classes there.
    """

    node: int
    neighbours: tuple[tuple[int, np.ndarray, np.ndarray, np.ndarray], ...]
    values: np.ndarray
    best: BestChoice

    def undo_choice(self, choices: list[int]) -> None:
        where = tuple([int(there[choices[v]]) for v, _, _, there in self.neighbours])
        choices[self.node] = self.best.given(where)

    def undo_excess(self, excess: list[np.ndarray]) -> None:
        floor, costs = np.zeros(self.values.shape), self.best.costs
        for axis, (node, _, matrix, there) in enumerate(self.neighbours):
            shape = [1] * floor.ndim
            shape[axis] = -1
            least = np.full(matrix.shape[1], inf)
            np.minimum.at(least, there, excess[node])
            floor = np.maximum(floor, least.reshape(shape))
        is_possible = np.isfinite(self.values) & np.isfinite(floor)
        beyond = floor - np.where(is_possible, self.values, 0)
        beyond_best = np.where(is_possible, beyond, inf)
        step = max(MOST_ENTRIES // max(floor.size, 1), 1)
        excess[self.node] = np.concatenate(
            [
                self._least_excess(slice(start, start + step), beyond_best)
                for start in range(0, costs.size, step)
            ]
        )

    def _least_excess(self, some: slice, beyond_best: np.ndarray) -> np.ndarray:
        shape = (-1,) + (1,) * beyond_best.ndim
        total = self.best.costs[some].reshape(shape) + beyond_best
        for axis, (_, here, matrix, _) in enumerate(self.neighbours):
            rows = matrix[here[some]]
            total = (
                total + np.expand_dims(rows, 2 - axis)
                if total.ndim > 2
                else (total + rows)
            )
        return np.maximum(total.reshape(len(total), -1).min(axis=1), 0.0)


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


def unfold_excess(
    steps: Sequence[Step],
    num_nodes: int,
    kept: Sequence[int],
    excess: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """[k] excess of each original node from that of the nodes `kept`."""
    full = [np.zeros(0)] * num_nodes
    for node, values in zip(kept, excess, strict=False):
        full[node] = values
    for step in reversed(steps):
        step.undo_excess(full)
    return full
