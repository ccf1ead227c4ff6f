"""Runs of entries that belong together, one after the other in an array."""

from __future__ import annotations

import numpy as np


def entries(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment, entry) of all: `counts[k]` entries from `first[k]` on, for each k."""
    segment = np.repeat(np.arange(len(first)), counts)
    before = np.cumsum(counts) - counts
    return segment, np.arange(len(segment)) + (first - before)[segment]


def entries_of(starts: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place, entry) from `starts[k]` to `starts[k + 1]` of each k that is chosen, with
    the place of k among them."""
    return entries(starts[chosen], starts[chosen + 1] - starts[chosen])
