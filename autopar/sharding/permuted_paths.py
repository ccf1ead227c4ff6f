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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from math import gcd, prod

from .mesh import MeshShape
from .placement import (
    Move,
    Placement,
    Step,
    moved_axes,
    permuted_pairs,
    reductions,
)
from .spec import SUM

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


@dataclass(frozen=True)
class _Reached:
    """A placement, and the cheapest steps between it and the end searched from."""

    cost: float
    placement: Placement
    steps: tuple[Step, ...]
    counts: tuple[int, ...]

    def may_become(self, finer: _Reached) -> bool:
        """Whether local slices cut this as finely."""
        return self.placement.pending == finer.placement.pending and not any(
            after % before
            for before, after in zip(self.counts, finer.counts, strict=True)
        )


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
        self.sizes, self.bundles, self.price = sizes, bundles, price
        self._parts_by_axes: dict[tuple[int, ...], int] = {}
        finest = 1 / prod(sizes)
        self.least = min(
            price(Step("collective_permute", (axis,), finest))
            for axis in range(len(sizes))
        )

    def path(
        self, start: Placement, goal: Placement, below: float
    ) -> tuple[Step, ...] | None:
        """The steps of the cheapest path, if it costs less than `below`."""
        limits = list(zip(self._counts(start), self._counts(goal), strict=True))

        def may_hold(dim: int, placement: Placement) -> bool:
            parts, (before, after) = self._parts(placement.dims[dim]), limits[dim]
            return before % parts == 0 or after % parts == 0

        def forward(here: Placement) -> Iterator[Move]:
            yield from reductions(here, goal, self.sizes, self.bundles, may_hold)
            yield from self._forward(here, goal, may_hold)

        def backward(here: Placement) -> Iterator[Move]:
            return self._backward(here, start, may_hold)

        if self.least >= below:
            return None
        ahead = self._explore(start, forward, below)
        behind = [
            replace(reached, steps=reached.steps[::-1])
            for reached in self._explore(goal, backward, below)
        ]
        found = None
        for before in ahead:
            for after in behind:
                ends_cost = before.cost + after.cost
                if ends_cost + self.least >= below:
                    break
                if not before.may_become(after):
                    continue
                sliced = self._sliced(before.placement, after)
                if sliced is None:
                    continue
                slices, here = sliced
                axes = moved_axes(here, after.placement, self.sizes)
                permute = Step("collective_permute", axes, self._fraction(here))
                cost = ends_cost + sum(map(self.price, (*slices, permute)))
                if axes and cost < below:
                    below, found = cost, (before, slices, here, permute, after)
        if found is None:
            return None
        before, slices, here, permute, after = found
        pairs = permuted_pairs(here, after.placement, self.sizes)
        return (*before.steps, *slices, replace(permute, groups=pairs), *after.steps)

    def _explore(
        self,
        origin: Placement,
        moves: Callable[[Placement], Iterable[Move]],
        below: float,
    ) -> list[_Reached]:
        """One placement for each cut that costs less than `below`, cheapest first."""
        tick = count(1)
        counts = self._counts(origin)
        queue = [(0.0, 0, _Reached(0.0, origin, (), counts))]
        found: dict[object, _Reached] = {}
        while queue:
            cost, _, here = heapq.heappop(queue)
            if found.setdefault((here.counts, here.placement.pending), here) != here:
                continue
            collectives = sum(step.is_collective for step in here.steps)
            for step, placement in moves(here.placement):
                total = cost + self.price(step)
                if total + self.least >= below:
                    continue
                if step.is_collective and collectives == _MOST:
                    continue
                counts = self._counts(placement)
                if (counts, placement.pending) not in found:
                    reached = _Reached(total, placement, (*here.steps, step), counts)
                    heapq.heappush(queue, (total, next(tick), reached))
        return list(found.values())

    def _forward(
        self,
        here: Placement,
        goal: Placement,
        may_hold: Callable[[int, Placement], bool],
    ) -> Iterator[Move]:
        for dim, axes in enumerate(here.dims):
            for first in range(len(axes)):
                suffix = axes[first:]
                rest = here.without(dim, suffix)
                yield Step("all_gather", suffix, self._fraction(rest), dim), rest
            yield from self._exchanges(here, dim, may_hold, is_source=True)
            for axis in self._addable(here, dim, goal):
                reached = here.append(dim, (axis,))
                if may_hold(dim, reached):
                    fraction = self._fraction(reached)
                    yield Step("slice", (axis,), fraction, dim), reached
        for axes in self.bundles:
            if axes and (axes[0], SUM) in goal.pending:
                if here.used().isdisjoint(axes):
                    yield Step("mask", axes, self._fraction(here)), here.owe(axes)

    def _backward(
        self,
        here: Placement,
        start: Placement,
        may_hold: Callable[[int, Placement], bool],
    ) -> Iterator[Move]:
        """Steps that lead here, each with where it comes from."""
        fraction = self._fraction(here)
        for axes in self.bundles:
            if axes and (axes[0], SUM) in {*here.pending} - {*start.pending}:
                yield Step("mask", axes, fraction), here.close(axes)
        for dim in range(len(here.dims)):
            chains: list[tuple[Placement, tuple[int, ...]]] = [(here, ())]
            while chains:
                finer, gathered = chains.pop()
                for axis in self._addable(finer, dim, start):
                    finest, axes = finer.append(dim, (axis,)), (*gathered, axis)
                    if may_hold(dim, finest):
                        yield Step("all_gather", axes, fraction, dim), finest
                        chains.append((finest, axes))
            if here.dims[dim]:
                axis = here.dims[dim][-1]
                yield Step("slice", (axis,), fraction, dim), here.without(dim, (axis,))
            yield from self._exchanges(here, dim, may_hold, is_source=False)

    def _exchanges(
        self,
        here: Placement,
        dim: int,
        may_hold: Callable[[int, Placement], bool],
        *,
        is_source: bool,
    ) -> Iterator[Move]:
        """The all_to_alls that take axes from `dim`, or those that brought them."""
        fraction = self._fraction(here)
        for first in range(len(here.dims[dim])):
            suffix = here.dims[dim][first:]
            rest = here.without(dim, suffix)
            for other in range(len(here.dims)):
                reached = rest.append(other, suffix)
                if other != dim and may_hold(other, reached):
                    dims = (dim, other) if is_source else (other, dim)
                    yield Step("all_to_all", suffix, fraction, *dims), reached

    def _addable(self, here: Placement, dim: int, end: Placement) -> list[int]:
        """An unused axis of each size to split `dim` by: the one of `end`, or any."""
        used = here.used()
        by_size = {
            size: axis for axis, size in enumerate(self.sizes) if axis not in used
        }
        wanted, before = self._parts(here.dims[dim]), 1
        for axis in end.dims[dim]:
            if before == wanted and axis not in used:
                by_size[self.sizes[axis]] = axis
            before *= self.sizes[axis]
        return list(by_size.values())

    def _parts(self, axes: tuple[int, ...]) -> int:
        """Into how many parts axes cut a dim."""
        found = self._parts_by_axes.get(axes)
        if found is None:
            found = prod(self.sizes[axis] for axis in axes)
            self._parts_by_axes[axes] = found
        return found

    def _counts(self, placement: Placement) -> tuple[int, ...]:
        return tuple(map(self._parts, placement.dims))

    def _fraction(self, placement: Placement) -> float:
        return 1.0 / prod(self._counts(placement))

    def _sliced(
        self, here: Placement, target: _Reached
    ) -> tuple[list[Step], Placement] | None:
        """Slices that cut a placement as finely as another does, if axes allow it."""
        steps: list[Step] = []
        for dim, parts in enumerate(target.counts):
            while (count := self._parts(here.dims[dim])) < parts:
                fitting = (
                    axis
                    for axis in self._addable(here, dim, target.placement)
                    if parts % (count * self.sizes[axis]) == 0
                )
                axis = next(fitting, None)
                if axis is None:
                    return None
                here = here.append(dim, (axis,))
                steps.append(Step("slice", (axis,), self._fraction(here), dim))
        return steps, here
