"""The cheapest collectives from one placement to another.

Dijkstra over placements. The moves are the collectives, plus two that cost nothing on
the wire: slicing a replicated axis onto a dim, and masking a replicated value so that
it is the sum of its shards. A permutation exchanges whole shards, and so gives axes
other meanings at the price of one shard: it leads to what is most like the goal. Dims
are cut on only into numbers that divide the goal's, so every placement on the way
divides whenever both ends do.

Axes are those of a finer mesh (`refined_mesh`): beside an axis of two, one of four is
two of two, and may hand over one, as where `P(x, y)` becomes `P(y, x)`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count
from math import gcd, inf

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


def cheapest_path(
    start: Placement,
    goal: Placement,
    sizes: Sequence[int],
    bundles: Sequence[tuple[int, ...]],
    price: Callable[[Step], float],
) -> tuple[Step, ...]:
    """The steps of the path that costs the least.

    Args:
      start: where the tensor lies.
      goal: where it shall lie.
      sizes: of the axes.
      bundles: the axes that make up each axis of the user's mesh.
      price: seconds of a step; the `groups` of a permutation are not yet known.
    """
    tick = count(1)
    queue: list[tuple[float, int, Placement]] = [(0.0, 0, start)]
    done: set[Placement] = set()
    least: dict[Placement, float] = {start: 0.0}
    arrival: dict[Placement, tuple[Step, Placement]] = {}
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == goal:
            return _steps_to(goal, arrival, sizes)
        if here in done:
            continue
        done.add(here)
        for step, reached in _moves(here, goal, sizes, bundles):
            total = cost + price(step)
            if total < least.get(reached, inf):
                least[reached] = total
                arrival[reached] = step, here
                heapq.heappush(queue, (total, next(tick), reached))
    raise AssertionError(f"no path from {start} to {goal}")


def _steps_to(
    goal: Placement,
    arrival: dict[Placement, tuple[Step, Placement]],
    sizes: Sequence[int],
) -> tuple[Step, ...]:
    steps = list[Step]()
    here = goal
    while here in arrival:
        step, before = arrival[here]
        if step.kind == "collective_permute":
            step = replace(step, groups=permuted_pairs(before, here, sizes))
        steps.append(step)
        here = before
    return tuple(reversed(steps))


def _moves(
    here: Placement,
    goal: Placement,
    sizes: Sequence[int],
    bundles: Sequence[tuple[int, ...]],
) -> Iterator[Move]:
    parts = goal.counts(sizes)

    def may_hold(dim: int, placement: Placement) -> bool:
        return parts[dim] % placement.counts(sizes)[dim] == 0

    yield from reductions(here, goal, sizes, bundles, may_hold)
    for dim, axes in enumerate(here.dims):
        for first in range(len(axes)):
            suffix = axes[first:]
            rest = here.without(dim, suffix)
            yield Step("all_gather", suffix, rest.fraction(sizes), dim), rest
            for target_dim in range(len(here.dims)):
                moved = rest.append(target_dim, suffix)
                if target_dim != dim and may_hold(target_dim, moved):
                    fraction = moved.fraction(sizes)
                    yield Step("all_to_all", suffix, fraction, dim, target_dim), moved
    used = here.used()
    for axis in range(len(sizes)):
        if axis in used:
            continue
        for dim in range(len(here.dims)):
            reached = here.append(dim, (axis,))
            if may_hold(dim, reached):
                yield Step("slice", (axis,), reached.fraction(sizes), dim), reached
    for axes in bundles:
        if axes and (axes[0], SUM) in goal.pending and used.isdisjoint(axes):
            yield Step("mask", axes, here.fraction(sizes)), here.owe(axes)
    reached = _exchanged(here, goal, sizes)
    if reached != here:
        axes = moved_axes(here, reached, sizes)
        yield Step("collective_permute", axes, here.fraction(sizes)), reached


def _exchanged(here: Placement, goal: Placement, sizes: Sequence[int]) -> Placement:
    """What is most like the goal and cuts dims as `here`, which it is if nothing is."""
    free = [axis for axis in range(len(sizes)) if axis not in dict(here.pending)]
    dims: list[list[int]] = [[] for _ in goal.dims]
    left = list(here.counts(sizes))

    def cut(dim: int, axes: Iterable[int]) -> None:
        for axis in axes:
            if axis in free and left[dim] % sizes[axis] == 0:
                dims[dim].append(axis)
                free.remove(axis)
                left[dim] //= sizes[axis]

    for axes_of in (goal.dims, here.dims, (tuple(free),) * len(dims)):
        for dim, axes in enumerate(axes_of):
            cut(dim, axes)
    if any(parts > 1 for parts in left):
        return here
    return Placement(tuple(map(tuple, dims)), here.pending)
