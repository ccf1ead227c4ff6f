"""The size of the memory that temporaries share: XLA's decreasing best fit.

`GlobalDecreasingSizeBestFitHeap`: buffers are placed one by one, the largest first or
the longest-lived first, whichever needs less in all. Each goes into the smallest gap
that is large enough between those that live at the same time, the lowest of such gaps,
or else above all of them. As nothing is moved again, gaps are left where lives cross.
"""

from __future__ import annotations

import numpy as np

from .execution_order import Liveness
from .names import roots

MOST_PLACED = 1500
"""Of more buffers it is taken that gaps are filled, as placing them takes long; of deep
models 1-3% are not."""

NEAR_PEAK = 0.8
"""What only lives where less than this part of the most is live does not matter."""


def packed_peak(liveness: Liveness, inner: np.ndarray) -> int:
    """The memory in which what is live in a block has room, at least what is live.

    Args:
      liveness: of the block.
      inner: [positions] bytes that each kernel's bodies need.
    """
    sizes = liveness.block.sizes
    own = (liveness.starts >= 0) & (sizes > 0)
    own[list(liveness.borrowed)] = False
    over = liveness.over[own[liveness.over].all(axis=1)]
    name = np.arange(len(sizes))  # what is written over others is one buffer with them
    name[over[:, 1]] = over[:, 0]
    values, at = np.flatnonzero(own), np.flatnonzero(inner)
    place = np.empty(len(sizes), np.intp)
    place[values] = np.arange(len(values))
    return packed_bytes(
        np.concatenate([sizes[values], inner[at]]),
        np.concatenate([liveness.starts[values], at]),
        np.concatenate([liveness.ends[values], at]),
        np.append(place[roots(name)[values]], len(values) + np.arange(len(at))),
    )


def packed_bytes(
    sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray, buffers: np.ndarray
) -> int:
    """The bytes in which all values have room.

    Value i has `sizes[i]` bytes from position `starts[i]` to `ends[i]`, both included,
    in the memory of value `buffers[i]`, the first that is there. Of equal ones the
    earlier is placed first. How long each lives counts what comes and goes meanwhile.
    """
    starts, ends = _event_times(starts, ends)
    last = ends.copy()
    np.maximum.at(last, buffers, ends)
    chosen = np.flatnonzero(buffers == np.arange(len(buffers)))
    sizes, starts, ends, last = (x[chosen] for x in (sizes, starts, ends, last))
    changes = np.zeros(int(last.max(initial=0)) + 2, np.int64)
    np.add.at(changes, starts, sizes)
    np.add.at(changes, last + 1, -sizes)
    live = np.cumsum(changes)
    least = int(live.max())
    before = np.concatenate([[0], np.cumsum(live >= NEAR_PEAK * least)])
    matters = np.flatnonzero(before[last + 1] > before[starts])
    if len(matters) > MOST_PLACED:
        return least
    sizes, starts, ends, last = (x[matters] for x in (sizes, starts, ends, last))
    by_size = np.lexsort((starts, starts - ends, -sizes))
    by_life = np.lexsort((starts, -sizes, starts - last))
    found = int(sizes.sum())
    for order in (by_size, by_life):
        if found > least:
            placed = sizes[order], starts[order], last[order]
            found = min(found, _bytes_in_order(*placed, enough=found))
    return found


def _event_times(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When values come and go, as numbers of what came or went before.

    At each position what is made there comes before anything goes.
    """
    count = len(starts)
    times = np.empty(2 * count, np.intp)
    times[np.argsort(np.append(2 * starts, 2 * ends + 1), kind="stable")] = np.arange(
        2 * count
    )
    return times[:count], times[count:]


def _bytes_in_order(
    sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray, enough: int
) -> int:
    """The bytes in which buffers have room that are placed in order.

    Or some that are at least `enough`.
    """
    low, high = np.zeros((2, len(sizes)), np.int64)
    lives = zip(sizes.tolist(), starts.tolist(), ends.tolist(), strict=True)
    most = 0
    for placed, (size, start, end) in enumerate(lives):
        met = np.flatnonzero((starts[:placed] <= end) & (ends[:placed] >= start))
        place = _lowest_fit(low[met], high[met], size)
        low[placed], high[placed] = place, place + size
        most = max(most, place + size)
        if most >= enough:
            break
    return most


def _lowest_fit(low: np.ndarray, high: np.ndarray, size: int) -> int:
    """Where the smallest gap of `size` bytes begins between places, or their end."""
    if not len(low):
        return 0
    order = low.argsort()
    begins = np.maximum.accumulate(high[order])
    gaps = low[order]
    gaps[1:] -= begins[:-1]
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(begins[-1])
    smallest = int(fits[gaps[fits].argmin()])
    return int(begins[smallest - 1]) if smallest else 0
