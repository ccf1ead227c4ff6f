"""Where stages begin along a line of work: the slowest as fast as can be, then cheap.

Work is a line of units i with cost c_i; a border before unit p moves b_p bytes between
stages. Borders lie between units that cost something, one place for each such gap, the
one with the fewest bytes, and the last of these: what comes behind a product belongs
to its stage, or the gradient of its parameter would be made on the next one. A dynamic
program over (stages, border) finds the smallest slowest stage; a second one, over
partitions in which no stage exceeds it nor an even share by more than `NEAR`, the
fewest bytes and then the most even stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEAR = 0.15  # how far over an even share a stage may be to move fewer bytes
_TIE = 1e-6  # weight of evenness where bytes are equal


def stage_borders(
    costs: Sequence[float], crossing_bytes: Sequence[float], num_stages: int
) -> list[int]:
    """Units at which stages 1, 2, ... begin; each stage has a unit with a cost.

    `crossing_bytes[p]` is what a border before unit p moves, infinite where none may
    lie.

    Raises:
      ValueError: fewer units with a cost than stages.
    """
    cost, crossing = np.asarray(costs, float), np.asarray(crossing_bytes, float)
    places = border_places(cost, crossing)
    heavy = cost[cost > 0]
    chosen = product_borders(heavy, crossing[places], num_stages, NEAR)
    return [places[i - 1] for i in chosen]


def product_borders(
    costs: Sequence[float] | np.ndarray,
    crossing_bytes: Sequence[float] | np.ndarray,
    num_stages: int,
    near: float = 0.0,
) -> list[int]:
    """Products at which stages 1, 2, ... begin; each stage has one or more.

    `crossing_bytes[p]` is what a border before product p + 1 moves, infinite where
    none may lie. No stage exceeds the smallest slowest stage, or `near` over an even
    share.

    Raises:
      ValueError: fewer products than stages.
    """
    cost, crossing = np.asarray(costs, float), np.asarray(crossing_bytes, float)
    is_allowed = np.isfinite(crossing)
    if is_allowed.sum() + bool(len(cost)) < num_stages:
        whole = is_allowed.sum() + bool(len(cost))
        raise ValueError(
            f"`num_stages` must be at most the number of products of the step's "
            f"forward pass, {len(cost)}"
            + (f", of which {whole} can be apart" if whole < len(cost) else "")
            + f", but got {num_stages}; those of a loop are one, unless it goes over "
            f"layers. Use fewer stages, or autopar.ShardParallel()."
        )
    done = np.concatenate([[0.0], np.cumsum(cost)])
    between = done[None, :] - done[:, None]  # cost of a stage from product i to j
    between[np.tril_indices(len(done))] = np.inf
    refused = np.array([0.0, *np.where(is_allowed, 0, np.inf), 0.0])
    slowest, _ = _best(between, refused, num_stages, np.maximum)
    limit = max(slowest, done[-1] / num_stages * (1 + near)) * (1 + 1e-9)
    uneven = np.where(between <= limit, (between / done[-1]) ** 2 * _TIE, np.inf)
    moved = np.array([0.0, *crossing, 0.0])
    moved /= max(moved[np.isfinite(moved)].sum(), 1.0)
    _, chosen = _best(uneven, moved, num_stages, np.add)
    return chosen


def border_places(
    costs: Sequence[float] | np.ndarray, crossing_bytes: Sequence[float] | np.ndarray
) -> list[int]:
    """The unit that a border after the k-th unit with a cost comes before, for all k.

    It is the one with the fewest bytes of its gap, of equal ones the last.
    """
    crossing = np.asarray(crossing_bytes, float)
    heavy = np.flatnonzero(np.asarray(costs, float) > 0)
    return [
        int(last - np.argmin(crossing[last:first:-1]))
        for first, last in zip(heavy[:-1], heavy[1:], strict=True)
    ]


def _best(
    stage: np.ndarray, border: np.ndarray, num_stages: int, join: np.ufunc
) -> tuple[float, list[int]]:
    """The least joined cost of `num_stages` stages, and the places between them."""
    reached = stage[0] + border
    before: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        through = join(reached[:, None], stage)
        before.append(np.argmin(through, axis=0))
        reached = through.min(axis=0) + border
    chosen = [len(border) - 1]
    for row in reversed(before):
        chosen.append(int(row[chosen[-1]]))
    return float(reached[-1]), chosen[:0:-1]
