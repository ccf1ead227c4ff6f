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
    own = liveness.starts >= 0
    own[list(liveness.borrowed)] = False
    over = liveness.over[own[liveness.over].all(axis=1)]
    name = np.arange(len(sizes))  # what is written over others is one buffer with them
    name[over[:, 1]] = over[:, 0]
    name = roots(name)
    last = liveness.ends.copy()
    np.maximum.at(last, name[own], liveness.ends[own])
    chosen = own & (name == np.arange(len(sizes))) & (sizes > 0)
    at = np.flatnonzero(inner)
    return packed_bytes(
        np.concatenate([sizes[chosen], inner[at]]),
        np.concatenate([liveness.starts[chosen], at]),
        np.concatenate([last[chosen], at]),
    )


def packed_bytes(sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    """The bytes in which all buffers have room.

    Buffer i has `sizes[i]` bytes from position `starts[i]` to `ends[i]`, both included.
    Of equal ones the earlier is placed first.
    """
    changes = np.zeros(int(ends.max(initial=0)) + 2, np.int64)
    np.add.at(changes, starts, sizes)
    np.add.at(changes, ends + 1, -sizes)
    live = np.cumsum(changes)
    least = int(live.max())
    before = np.concatenate([[0], np.cumsum(live >= NEAR_PEAK * least)])
    matters = np.flatnonzero(before[ends + 1] > before[starts])
    if len(matters) > MOST_PLACED:
        return least
    sizes, starts, ends = sizes[matters], starts[matters], ends[matters]
    by_size = np.lexsort((starts, starts - ends, -sizes))
    by_life = np.lexsort((starts, -sizes, starts - ends))
    found = int(sizes.sum())
    for order in (by_size, by_life):
        if found > least:
            buffers = sizes[order], starts[order], ends[order]
            found = min(found, _bytes_in_order(*buffers, enough=found))
    return found


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
