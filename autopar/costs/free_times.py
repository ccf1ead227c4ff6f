"""When places are free: a bit each, kept by blocks of positions.

A block of positions, and a block of those, knows the places that are taken at some time
in it, and those that are taken throughout. So whatever is asked for or taken is a few
operations on large integers, however long it is and however many places there are.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np

_SHIFT = 5
_WIDTH = 1 << _SHIFT  # positions are a block, and so many blocks a large one


class FreeTimes:
    """Which places are free from one position to another, as the bits of an integer."""

    def __init__(self, first: np.ndarray, last: np.ndarray) -> None:
        """Place p is free from position `first[p]` to `last[p]`, both included."""
        self._first, self._last = np.sort(first), np.sort(last)
        self._begun = _unions(np.argsort(first))
        self._left = [~ended for ended in _unions(np.argsort(last))]
        size = int(last.max()) + 1
        self._at = [0] * size
        small, large = (size >> _SHIFT) + 1, (size >> 2 * _SHIFT) + 1
        self._some, self._throughout = [0] * small, [0] * small
        self._some_large, self._throughout_large = [0] * large, [0] * large

    def at_first(
        self, start: np.ndarray, end: np.ndarray, lowest: np.ndarray
    ) -> list[int]:
        """What is free from `start[i]` to `end[i]` of the places `lowest[i]` and on,
        before any is taken."""
        begun = np.searchsorted(self._first, start, "right").tolist()
        ended = np.searchsorted(self._last, end).tolist()
        above = [-1 << place for place in range(len(self._first) + 1)]
        return [
            self._begun[i] & self._left[j] & above[place]
            for i, j, place in zip(begun, ended, lowest.tolist(), strict=True)
        ]

    def taken(self, start: int, end: int) -> int:
        """The places that are taken at some time from `start` to `end`."""
        low, high = start >> _SHIFT, end >> _SHIFT
        if low == high:
            found = self._throughout[low] | self._throughout_large[low >> _SHIFT]
            if end - start < 2:
                return found | self._at[start] | self._at[end]
            return reduce(or_, self._at[start : end + 1], found)
        bottom, top = low >> _SHIFT, high >> _SHIFT
        found = self._throughout[low] | self._throughout[high]
        found |= self._throughout_large[bottom] | self._throughout_large[top]
        if high - low < 2:
            return reduce(or_, self._at[start : end + 1], found)
        found = reduce(or_, self._at[start : (low + 1) << _SHIFT], found)
        found = reduce(or_, self._at[high << _SHIFT : end + 1], found)
        if top - bottom < 2:
            return reduce(or_, self._some[low + 1 : high], found)
        found = reduce(or_, self._some[low + 1 : (bottom + 1) << _SHIFT], found)
        found = reduce(or_, self._some[top << _SHIFT : high], found)
        return reduce(or_, self._some_large[bottom + 1 : top], found)

    def take(self, place: int, start: int, end: int) -> None:
        """Takes a place from `start` to `end`, which must be free then."""
        bit = 1 << place
        low, high = start >> _SHIFT, end >> _SHIFT
        bottom, top = low >> _SHIFT, high >> _SHIFT
        self._some[low] |= bit
        self._some_large[bottom] |= bit
        if high - low < 2:
            for at in range(start, end + 1):
                self._at[at] |= bit
            if high > low:
                self._some[high] |= bit
                self._some_large[top] |= bit
            return
        self._some[high] |= bit
        self._some_large[top] |= bit
        _add(bit, self._at, start, (low + 1) << _SHIFT)
        _add(bit, self._at, high << _SHIFT, end + 1)
        blocks = [(low + 1, high)]
        if top - bottom >= 2:
            blocks = [(low + 1, (bottom + 1) << _SHIFT), (top << _SHIFT, high)]
            _add(bit, self._some_large, bottom + 1, top)
            _add(bit, self._throughout_large, bottom + 1, top)
        for first, stop in blocks:
            _add(bit, self._some, first, stop)
            _add(bit, self._throughout, first, stop)


def _add(bit: int, masks: list[int], first: int, stop: int) -> None:
    for at in range(first, stop):
        masks[at] |= bit


def _unions(order: np.ndarray) -> list[int]:
    """The first n places of an order as bits, for each n."""
    found = [0]
    for place in order.tolist():
        found.append(found[-1] | 1 << place)
    return found
