"""The size of the memory that temporaries share: XLA's decreasing best fit.

`GlobalDecreasingSizeBestFitHeap`: buffers are placed one by one, the largest first or
the longest-lived first, whichever needs less in all. Each goes into the smallest gap
that is large enough between those that live at the same time, the lowest of such gaps,
or else above all of them. As nothing is moved again, gaps are left where lives cross.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .execution_order import Liveness
from .names import roots

MOST_PLACED = 1500
"""Of more buffers it is taken that gaps are filled, as placing them takes long; of deep
models 1-3% are not."""

NEAR_PEAK = 0.8
"""What only lives where less than this part of the most is live does not matter."""


class _Buffers(NamedTuple):
    """Values by size, first and last position, and the one whose memory each is in."""

    sizes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    buffers: np.ndarray


class _Placed(NamedTuple):
    """The bytes in which all have room; those placed, and how far up each reaches."""

    bytes: int
    buffers: np.ndarray
    tops: np.ndarray


def packed_peak(liveness: Liveness, inner: np.ndarray) -> int:
    """The memory in which what is live in a block has room, at least what is live.

    Args:
      liveness: of the block.
      inner: [positions] bytes that each kernel's bodies need.
    """
    return packed_bytes(*_buffers_of(liveness, inner))


def packed_heights(liveness: Liveness, inner: np.ndarray) -> np.ndarray:
    """[positions] how far up memory is in use while each kernel of a block runs.

    At least what is live there; the most of it is what `packed_peak` says.
    """
    held = _buffers_of(liveness, inner)
    own = liveness.block.columns.inner_bytes[list(liveness.order)]
    heights = liveness.bytes - own + inner
    _, placed, tops = _place(held)
    last = _last_uses(held.ends, held.buffers)
    for buffer, top in zip(placed.tolist(), tops.tolist(), strict=True):
        lives = heights[held.starts[buffer] : last[buffer] + 1]
        np.maximum(lives, top, out=lives)
    return heights


def packed_bytes(
    sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray, buffers: np.ndarray
) -> int:
    """The bytes in which all values have room.

    Value i has `sizes[i]` bytes from position `starts[i]` to `ends[i]`, both included,
    in the memory of value `buffers[i]`, the first that is there. Of equal ones the
    earlier is placed first. How long each lives counts what comes and goes meanwhile.
    """
    return _place(_Buffers(sizes, starts, ends, buffers)).bytes


def _buffers_of(liveness: Liveness, inner: np.ndarray) -> _Buffers:
    """What has memory of a block's own, and what bodies need of it."""
    sizes = liveness.block.sizes
    own = (liveness.starts >= 0) & (sizes > 0)
    own[list(liveness.borrowed)] = False
    over = liveness.over[own[liveness.over].all(axis=1)]
    name = np.arange(len(sizes))  # what is written over others is one buffer with them
    name[over[:, 1]] = over[:, 0]
    values, at = np.flatnonzero(own), np.flatnonzero(inner)
    place = np.empty(len(sizes), np.intp)
    place[values] = np.arange(len(values))
    return _Buffers(
        np.concatenate([sizes[values], inner[at]]),
        np.concatenate([liveness.starts[values], at]),
        np.concatenate([liveness.ends[values], at]),
        np.append(place[roots(name)[values]], len(values) + np.arange(len(at))),
    )


def _last_uses(ends: np.ndarray, buffers: np.ndarray) -> np.ndarray:
    """[values] when what is in the memory of each goes, where it is the first there."""
    last = ends.copy()
    np.maximum.at(last, buffers, ends)
    return last


def _place(held: _Buffers) -> _Placed:
    """Of both orders, the first, or the second if it needs less.

    Nothing is placed of too many buffers, nor of what lives far from the peak.
    """
    sizes, buffers = held.sizes, held.buffers
    starts, ends = _event_times(held.starts, held.ends)
    last = _last_uses(ends, buffers)
    chosen = np.flatnonzero(buffers == np.arange(len(buffers)))
    changes = np.zeros(int(last[chosen].max(initial=0)) + 2, np.int64)
    np.add.at(changes, starts[chosen], sizes[chosen])
    np.add.at(changes, last[chosen] + 1, -sizes[chosen])
    live = np.cumsum(changes)
    least = int(live.max())
    before = np.concatenate([[0], np.cumsum(live >= NEAR_PEAK * least)])
    chosen = chosen[before[last[chosen] + 1] > before[starts[chosen]]]
    if len(chosen) > MOST_PLACED:
        return _Placed(least, chosen[:0], sizes[:0])
    sizes, starts, ends, last = (x[chosen] for x in (sizes, starts, ends, last))
    by_size = np.lexsort((starts, starts - ends, -sizes))
    by_life = np.lexsort((starts, -sizes, starts - last))
    best = _Placed(int(sizes.sum()) + 1, chosen[:0], sizes[:0])
    for order in (by_size, by_life):
        if best.bytes > least:
            placed = sizes[order], starts[order], last[order]
            tops = _tops_in_order(*placed, enough=best.bytes)
            if tops is not None:
                best = _Placed(int(tops.max(initial=0)), chosen[order], tops)
    return best


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


def _tops_in_order(
    sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray, enough: int
) -> np.ndarray | None:
    """[buffers] how far up each reaches that are placed in order.

    None if one comes to `enough`.
    """
    low, high = np.zeros((2, len(sizes)), np.int64)
    lives = zip(sizes.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for placed, (size, start, end) in enumerate(lives):
        met = np.flatnonzero((starts[:placed] <= end) & (ends[:placed] >= start))
        place = _lowest_fit(low[met], high[met], size)
        low[placed], high[placed] = place, place + size
        if place + size >= enough:
            return None
    return high


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
