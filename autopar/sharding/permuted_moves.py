"""The steps on either side of a permutation (`permuted_paths.py`), found once each.

Forward they lead from the start to some cut of the dims, backward from the goal to what
leads there. Most say the same for every pair of ends, so they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from .placement import Move, Placement, Step, reductions
from .spec import SUM

Limits = tuple[tuple[int, int], ...]
"""By dim, the parts that it is cut into at the start and at the goal."""


class PermutedMove(NamedTuple):
    """A step with its seconds, and the number of the placement it leads to.

    `dim` is one that is cut further, and which `may_hold` is still to be asked of.
    """

    seconds: float
    step: Step
    end: int
    dim: int = -1


def may_hold(parts: int, limit: tuple[int, int]) -> bool:
    """Whether a dim may be cut so: what divides one of its ends divides the dim."""
    before, after = limit
    return before % parts == 0 or after % parts == 0


class PermutedMoves:
    """The moves on one mesh, between numbered placements.

    `placements` are those met so far, `counts` into how many parts each cuts each dim,
    and `cuts` the number of that together with what is pending. See `PermutedPaths` for
    the arguments.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        bundles: Sequence[tuple[int, ...]],
        price: Callable[[Step], float],
    ) -> None:
        self.sizes, self.bundles, self.price = sizes, bundles, price
        self.placements: list[Placement] = []
        self.counts: list[tuple[int, ...]] = []
        self.cuts: list[int] = []
        self._number: dict[Placement, int] = {}
        self._cut: dict[object, int] = {}
        self._parts: dict[tuple[int, ...], int] = {}
        self._known: dict[object, tuple[PermutedMove, ...]] = {}

    def number(self, placement: Placement) -> int:
        """The number of a placement."""
        found = self._number.setdefault(placement, len(self.placements))
        if found == len(self.placements):
            counts = tuple(map(self.parts, placement.dims))
            cut = counts, placement.pending
            self.placements.append(placement)
            self.counts.append(counts)
            self.cuts.append(self._cut.setdefault(cut, len(self._cut)))
        return found

    def parts(self, axes: tuple[int, ...]) -> int:
        """Into how many parts axes cut a dim."""
        found = self._parts.get(axes)
        if found is None:
            found = self._parts[axes] = prod(self.sizes[axis] for axis in axes)
        return found

    def fraction(self, placement: Placement) -> float:
        """One shard as a part of the tensor."""
        return 1.0 / prod(map(self.parts, placement.dims))

    def forward(self, here: int, goal: Placement, limits: Limits) -> list[PermutedMove]:
        """Steps that lead on from a placement, by its number."""
        found, known = list[PermutedMove](), self._known
        placement = self.placements[here]
        if placement.pending:
            found += self._closing(placement, goal, limits)
        for dim, axes in enumerate(goal.dims):
            key = here, dim, axes
            if key not in known:
                leaving = self._leaving(placement, dim)
                known[key] = *leaving, *self._slicing(placement, dim, goal)
            found += known[key]
        if goal.pending:
            found += self._masking(placement, goal)
        return found

    def backward(
        self, here: int, start: Placement, limits: Limits
    ) -> list[PermutedMove]:
        """Steps that lead to a placement, each with where it comes from."""
        found, known = list[PermutedMove](), self._known
        placement = self.placements[here]
        if placement.pending:
            found += self._masked(placement, start)
        for dim, axes in enumerate(start.dims):
            key = here, dim, axes, limits[dim]
            if key not in known:
                gathered = self._gathered(placement, dim, start, limits[dim])
                known[key] = *gathered, *self._arriving(placement, dim)
            found += known[key]
        return found

    def addable(self, here: Placement, dim: int, end: Placement) -> list[int]:
        """An unused axis of each size to split `dim` by: the one of `end`, or any."""
        used = here.used()
        by_size = {
            size: axis for axis, size in enumerate(self.sizes) if axis not in used
        }
        wanted, before = self.parts(here.dims[dim]), 1
        for axis in end.dims[dim]:
            if before == wanted and axis not in used:
                by_size[self.sizes[axis]] = axis
            before *= self.sizes[axis]
        return list(by_size.values())

    def _move(self, move: Move, dim: int = -1) -> PermutedMove:
        step, end = move
        return PermutedMove(self.price(step), step, self.number(end), dim)

    def _closing(
        self, here: Placement, goal: Placement, limits: Limits
    ) -> Iterator[PermutedMove]:
        def may_hold_there(dim: int, placement: Placement) -> bool:
            return may_hold(self.parts(placement.dims[dim]), limits[dim])

        for move in reductions(here, goal, self.sizes, self.bundles, may_hold_there):
            yield self._move(move)

    def _masking(self, here: Placement, goal: Placement) -> Iterator[PermutedMove]:
        for axes in self.bundles:
            if axes and (axes[0], SUM) in goal.pending:
                if here.used().isdisjoint(axes):
                    step = Step("mask", axes, self.fraction(here))
                    yield self._move((step, here.owe(axes)))

    def _masked(self, here: Placement, start: Placement) -> Iterator[PermutedMove]:
        for axes in self.bundles:
            if axes and (axes[0], SUM) in {*here.pending} - {*start.pending}:
                step = Step("mask", axes, self.fraction(here))
                yield self._move((step, here.close(axes)))

    def _leaving(self, here: Placement, dim: int) -> Iterator[PermutedMove]:
        """What takes axes from `dim`."""
        axes = here.dims[dim]
        for first in range(len(axes)):
            rest = here.without(dim, axes[first:])
            step = Step("all_gather", axes[first:], self.fraction(rest), dim)
            yield self._move((step, rest))
        yield from self._exchanges(here, dim, is_forward=True)

    def _arriving(self, here: Placement, dim: int) -> Iterator[PermutedMove]:
        """What brought axes to `dim`, but for all_gathers."""
        axes = here.dims[dim]
        if axes:
            step = Step("slice", axes[-1:], self.fraction(here), dim)
            yield self._move((step, here.without(dim, axes[-1:])))
        yield from self._exchanges(here, dim, is_forward=False)

    def _exchanges(
        self, here: Placement, dim: int, *, is_forward: bool
    ) -> Iterator[PermutedMove]:
        """The all_to_alls that take axes from `dim`, or those that brought them."""
        fraction, axes = self.fraction(here), here.dims[dim]
        for first in range(len(axes)):
            rest = here.without(dim, axes[first:])
            for other in range(len(here.dims)):
                if other != dim:
                    dims = (dim, other) if is_forward else (other, dim)
                    step = Step("all_to_all", axes[first:], fraction, *dims)
                    yield self._move((step, rest.append(other, axes[first:])), other)

    def _slicing(
        self, here: Placement, dim: int, goal: Placement
    ) -> Iterator[PermutedMove]:
        for axis in self.addable(here, dim, goal):
            reached = here.append(dim, (axis,))
            step = Step("slice", (axis,), self.fraction(reached), dim)
            yield self._move((step, reached), dim)

    def _gathered(
        self, here: Placement, dim: int, start: Placement, limit: tuple[int, int]
    ) -> Iterator[PermutedMove]:
        """The all_gathers that lead here, from what is cut finer along `dim`."""
        fraction = self.fraction(here)
        chains: list[tuple[Placement, tuple[int, ...]]] = [(here, ())]
        while chains:
            finer, gathered = chains.pop()
            for axis in self.addable(finer, dim, start):
                finest, axes = finer.append(dim, (axis,)), (*gathered, axis)
                if may_hold(self.parts(finest.dims[dim]), limit):
                    step = Step("all_gather", axes, fraction, dim)
                    yield self._move((step, finest))
                    chains.append((finest, axes))
