"""The cheapest collectives from one placement to another, each axis kept as it is.

Dijkstra over placements. The moves are the collectives but for the permutation (see
`permuted_paths`), plus two that cost nothing on the wire: slicing a replicated axis
onto a dim, and masking a replicated value so that it is the sum of its shards. A dim
never holds axes that neither end puts on it, so every placement on the way divides
whenever both ends do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf

from .placement import Move, Placement, Step, reductions
from .spec import SUM


def direct_path(
    start: Placement,
    goal: Placement,
    sizes: Sequence[int],
    price: Callable[[Step], float],
) -> tuple[float, tuple[Step, ...]]:
    """What the path costs, and its steps."""
    tick = count(1)
    queue: list[tuple[float, int, Placement, tuple[Step, ...]]] = [(0.0, 0, start, ())]
    done: set[Placement] = set()
    least: dict[Placement, float] = {start: 0.0}
    while queue:
        cost, _, placement, path = heapq.heappop(queue)
        if placement == goal:
            return cost, path
        if placement in done:
            continue
        done.add(placement)
        for step, reached in _moves(placement, goal, sizes):
            if reached not in done:
                total = cost + price(step)
                if total < least.get(reached, inf):
                    least[reached] = total
                    heapq.heappush(queue, (total, next(tick), reached, (*path, step)))
    raise AssertionError(f"no path from {start} to {goal}")


def _moves(here: Placement, goal: Placement, sizes: Sequence[int]) -> Iterator[Move]:
    wanted = {axis: dim for dim, axes in enumerate(goal.dims) for axis in axes}

    def may_hold(dim: int, placement: Placement) -> bool:
        return set(placement.dims[dim]) <= set(goal.dims[dim])

    bundles = [(axis,) for axis in range(len(sizes))]
    yield from reductions(here, goal, sizes, bundles, may_hold)
    for dim, axes in enumerate(here.dims):
        for first in range(len(axes)):
            suffix = axes[first:]
            rest = here.without(dim, suffix)
            yield Step("all_gather", suffix, rest.fraction(sizes), dim), rest
            targets = {wanted.get(axis, dim) for axis in suffix}
            if len(targets) == 1 and dim not in targets:
                target_dim = targets.pop()
                moved = rest.append(target_dim, suffix)
                if may_hold(target_dim, moved):
                    fraction = moved.fraction(sizes)
                    yield Step("all_to_all", suffix, fraction, dim, target_dim), moved
    used = here.used()
    for axis in range(len(sizes)):
        if axis in used:
            continue
        dim = wanted.get(axis)
        if dim is not None:
            reached = here.append(dim, (axis,))
            if may_hold(dim, reached):
                yield Step("slice", (axis,), reached.fraction(sizes), dim), reached
        elif (axis, SUM) in goal.pending:
            yield Step("mask", (axis,), here.fraction(sizes)), here.owe((axis,))
