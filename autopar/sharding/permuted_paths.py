"""Paths between placements on which devices exchange whole shards once.

A permutation gives axes other meanings at the price of one shard. What comes before it
leads from the start to some cut of the dims, and what comes after leads from a cut that
is as fine or finer to the goal; local slices make up the difference. Which axes make
the first cut does not matter, as the permutation renames them, so each side is one
search over cuts: forward from the start, backward from the goal.

Axes are those of a finer mesh (`refined_mesh`): beside an axis of two, one of four is
two of two, and may hand over one, as where `P(x, y)` becomes `P(y, x)`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, count
from math import gcd, prod
from typing import NamedTuple

from .mesh import MeshShape
from .permutation_bound import PermutationBound
from .permuted_moves import Limits, PermutedMove, PermutedMoves, may_hold
from .placement import Placement, Step, moved_axes, permuted_pairs

_MOST_AXES = 4  # of a finer mesh: searches on six take ten times as long


def refined_mesh(mesh: MeshShape) -> tuple[MeshShape, list[tuple[int, ...]]]:
    """The same devices with axes whose sizes are equal or coprime, and whose they are.

    Returns:
      The mesh, and for each axis of the given one those that it is made of. Where these
      would be many, the mesh as it is.
    """
    factors = _coprime_base(mesh.axis_sizes)
    sizes: list[int] = []
    parts: list[tuple[int, ...]] = []
    for size in mesh.axis_sizes:
        first = len(sizes)
        for factor in factors:
            while size % factor == 0:
                sizes.append(factor)
                size //= factor
        parts.append(tuple(range(first, len(sizes))))
    sizes = sizes or [1]
    if len(sizes) > max(_MOST_AXES, mesh.num_axes):
        return mesh, [(axis,) for axis in range(mesh.num_axes)]
    return MeshShape(tuple(map(str, range(len(sizes)))), tuple(sizes)), parts


def _coprime_base(numbers: Iterable[int]) -> list[int]:
    """Coprime numbers above one of whose powers all the others are products."""
    base = sorted({number for number in numbers if number > 1})
    for first, second in combinations(base, 2):
        common = gcd(first, second)
        if common > 1:
            rest = {number for number in base if number not in (first, second)}
            return _coprime_base(rest | {first // common, common, second // common})
    return base


_MOST = 2  # collectives on each side of the permutation


class _Reached(NamedTuple):
    """A placement by its number, and the cheapest steps between it and the end."""

    cost: float
    place: int
    steps: tuple[Step, ...]
    num_collectives: int


class PermutedPaths:
    """Searches on one mesh.

    Args:
      sizes: of the axes; equal or coprime ones have the most paths.
      bundles: the axes that make up each axis of the user's mesh.
      price: of a step; the `groups` of a permutation are not yet known.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        bundles: Sequence[tuple[int, ...]],
        price: Callable[[Step], float],
    ) -> None:
        self.sizes, self.price = sizes, price
        self._moves = PermutedMoves(sizes, bundles, price)
        self._bound = PermutationBound.of(sizes, price)

    def path(
        self, start: Placement, goal: Placement, below: float
    ) -> tuple[Step, ...] | None:
        """The steps of the cheapest path, if it costs less than `below`."""
        moves, bound = self._moves, self._bound
        first, last = moves.number(start), moves.number(goal)
        limits = tuple(zip(moves.counts[first], moves.counts[last], strict=True))
        finest = 1.0 / prod(map(max, limits))
        to_permute = bound.permutation(finest)
        to_goal = bound.path(finest, moves.fraction(goal))
        if to_goal >= below:
            return None

        def forward(here: int) -> list[PermutedMove]:
            return moves.forward(here, goal, limits)

        def backward(here: int) -> list[PermutedMove]:
            return moves.backward(here, start, limits)

        ahead = self._explore(first, forward, limits, below - to_goal)
        behind = self._explore(last, backward, limits, below - to_permute)
        found = None
        for before in ahead:
            source = moves.placements[before.place]
            for after in behind:
                ends_cost = before.cost + after.cost
                if ends_cost + to_permute >= below:
                    break
                counts = moves.counts[after.place]
                if ends_cost + bound.permutation(1.0 / prod(counts)) >= below:
                    continue
                target = moves.placements[after.place]
                if source.pending != target.pending:
                    continue
                sliced = self._sliced(source, target, counts)
                if sliced is None:
                    continue
                slices, here = sliced
                axes = moved_axes(here, target, self.sizes)
                permute = Step("collective_permute", axes, moves.fraction(here))
                cost = ends_cost + sum(map(self.price, (*slices, permute)))
                if axes and cost < below:
                    below = cost
                    found = before.steps, slices, here, permute, target, after.steps
        if found is None:
            return None
        steps, slices, here, permute, target, rest = found
        pairs = permuted_pairs(here, target, self.sizes)
        return (*steps, *slices, replace(permute, groups=pairs), *rest[::-1])

    def _explore(
        self,
        origin: int,
        moves: Callable[[int], Iterable[PermutedMove]],
        limits: Limits,
        below: float,
    ) -> list[_Reached]:
        """One placement for each cut that costs less than `below`, cheapest first."""
        tick, counts, cuts = count(1), self._moves.counts, self._moves.cuts
        queue = [(0.0, 0, _Reached(0.0, origin, (), 0))]
        found, least = dict[int, _Reached](), dict[int, float]()  # by cut
        while queue:
            cost, _, here = heapq.heappop(queue)
            if found.setdefault(cuts[here.place], here) is not here:
                continue
            for seconds, step, end, dim in moves(here.place):
                total = cost + seconds
                cut = cuts[end]
                if total >= least.get(cut, below) or cut in found:
                    continue
                if dim >= 0 and not may_hold(counts[end][dim], limits[dim]):
                    continue
                number = here.num_collectives + step.is_collective
                if step.is_collective and number > _MOST:
                    continue
                least[cut] = total
                reached = _Reached(total, end, (*here.steps, step), number)
                heapq.heappush(queue, (total, next(tick), reached))
        return list(found.values())

    def _sliced(
        self, here: Placement, target: Placement, counts: tuple[int, ...]
    ) -> tuple[list[Step], Placement] | None:
        """Slices that cut a placement as finely as the target, if axes allow it."""
        steps, moves = list[Step](), self._moves
        if any(
            parts % moves.parts(axes)
            for parts, axes in zip(counts, here.dims, strict=True)
        ):
            return None
        for dim, parts in enumerate(counts):
            while (count := moves.parts(here.dims[dim])) < parts:
                fitting = (
                    axis
                    for axis in moves.addable(here, dim, target)
                    if parts % (count * self.sizes[axis]) == 0
                )
                axis = next(fitting, None)
                if axis is None:
                    return None
                here = here.append(dim, (axis,))
                steps.append(Step("slice", (axis,), moves.fraction(here), dim))
        return steps, here
