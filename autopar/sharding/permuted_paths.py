"""Paths between placements on which devices exchange whole shards once.

A permutation gives axes other meanings at the price of one shard. What comes before it
leads from the start to some cut of the dims, and what comes after leads from a cut that
is as fine or finer to the goal; local slices make up the difference. Which axes make
the first cut does not matter, as the permutation renames them, so each side is one
search over cuts: forward from the start, backward from the goal.

Axes are those of a mesh whose sizes are all prime (`prime_mesh`): an axis of four may
then hand over one of its two factors, as where `P(x, y)` becomes `P(y, x)` on 2 x 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod

from .mesh import MeshShape
from .placement import (
    Move,
    Placement,
    Step,
    moved_axes,
    permuted_pairs,
    reductions,
    roles,
)
from .spec import SUM


def prime_mesh(mesh: MeshShape) -> tuple[MeshShape, list[tuple[int, ...]]]:
    """The same devices with axes of prime sizes, and those that make up each axis."""
    sizes: list[int] = []
    parts: list[tuple[int, ...]] = []
    for size in mesh.axis_sizes:
        factors = _prime_factors(size)
        parts.append(tuple(range(len(sizes), len(sizes) + len(factors))))
        sizes.extend(factors)
    sizes = sizes or [1]
    return MeshShape(tuple(map(str, range(len(sizes)))), tuple(sizes)), parts


def _prime_factors(size: int) -> list[int]:
    factors, divisor = [], 2
    while size > 1:
        if size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        else:
            divisor += 1
    return factors


@dataclass(frozen=True)
class _Reached:
    """A placement, and the cheapest steps between it and the end searched from."""

    cost: float
    placement: Placement
    steps: tuple[Step, ...]


class PermutedPaths:
    """Searches on one mesh.

    Args:
      sizes: of the axes, all prime.
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

    def path(
        self, start: Placement, goal: Placement, below: float
    ) -> tuple[Step, ...] | None:
        """The steps of the cheapest path, if it costs less than `below`."""
        ends = start.counts(self.sizes), goal.counts(self.sizes)
        limits = tuple(zip(*ends, strict=True))

        def may_hold(dim: int, placement: Placement) -> bool:
            parts = prod(self.sizes[axis] for axis in placement.dims[dim])
            return any(limit % parts == 0 for limit in limits[dim])

        def forward(here: Placement) -> Iterator[Move]:
            yield from reductions(here, goal, self.sizes, self.bundles, may_hold)
            yield from self._forward(here, goal, may_hold)

        def backward(here: Placement) -> Iterator[Move]:
            return self._backward(here, start, may_hold)

        ahead = self._explore(start, forward, below)
        behind = [
            replace(reached, steps=reached.steps[::-1])
            for reached in self._explore(goal, backward, below)
        ]
        found = None
        for before in ahead:
            for after in behind:
                ends_cost = before.cost + after.cost
                if ends_cost >= below:
                    break
                sliced = self._sliced(before.placement, after.placement)
                if sliced is None:
                    continue
                slices, here = sliced
                axes = moved_axes(here, after.placement, self.sizes)
                permute = Step("collective_permute", axes, here.fraction(self.sizes))
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
        queue = [(0.0, 0, _Reached(0.0, origin, ()))]
        found: dict[object, _Reached] = {}
        while queue:
            cost, _, here = heapq.heappop(queue)
            cut = here.placement.counts(self.sizes), here.placement.pending
            if cut in found:
                continue
            found[cut] = here
            for step, placement in moves(here.placement):
                total = cost + self.price(step)
                if total < below:
                    reached = _Reached(total, placement, (*here.steps, step))
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
                yield Step("all_gather", suffix, rest.fraction(self.sizes), dim), rest
            yield from self._exchanges(here, dim, may_hold, is_source=True)
            for axis in self._addable(here, dim, goal):
                reached = here.append(dim, (axis,))
                if may_hold(dim, reached):
                    fraction = reached.fraction(self.sizes)
                    yield Step("slice", (axis,), fraction, dim), reached
        for axes in self.bundles:
            if axes and (axes[0], SUM) in goal.pending:
                if here.used().isdisjoint(axes):
                    yield Step("mask", axes, here.fraction(self.sizes)), here.owe(axes)

    def _backward(
        self,
        here: Placement,
        start: Placement,
        may_hold: Callable[[int, Placement], bool],
    ) -> Iterator[Move]:
        """Steps that lead here, each with where it comes from."""
        fraction = here.fraction(self.sizes)
        for dim in range(len(here.dims)):
            chains: list[tuple[Placement, tuple[int, ...]]] = [(here, ())]
            while chains:
                finer, gathered = chains.pop()
                for axis in self._addable(finer, dim, start):
                    finest, axes = finer.append(dim, (axis,)), (*gathered, axis)
                    if may_hold(dim, finest):
                        yield Step("all_gather", axes, fraction, dim), finest
                        chains.append((finest, axes))
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
        fraction = here.fraction(self.sizes)
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
        role = dim, prod(self.sizes[axis] for axis in here.dims[dim])
        for axis, other in enumerate(roles(end, self.sizes)):
            if other == role and axis not in used:
                by_size[self.sizes[axis]] = axis
        return list(by_size.values())

    def _sliced(
        self, here: Placement, target: Placement
    ) -> tuple[list[Step], Placement] | None:
        """Slices that cut a placement as finely as another, if that refines it."""
        if here.pending != target.pending:
            return None
        steps: list[Step] = []
        wanted = target.counts(self.sizes)
        for before, after in zip(here.counts(self.sizes), wanted, strict=True):
            if after % before:
                return None
        for dim, parts in enumerate(wanted):
            while (count := here.counts(self.sizes)[dim]) < parts:
                fits = [
                    axis
                    for axis in self._addable(here, dim, target)
                    if parts % (count * self.sizes[axis]) == 0
                ]
                here = here.append(dim, (fits[0],))
                fraction = here.fraction(self.sizes)
                steps.append(Step("slice", (fits[0],), fraction, dim))
        return steps, here
