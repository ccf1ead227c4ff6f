"""Where a sequence of units is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from benchmarks.published.simulator import Model


_HALVINGS = 10  # of the interval that holds the slowest stage's seconds
_EXCESS = 3.0  # bytes of a border over a neighbour's from which on it is no cut


def equal_bounds(model: Model, stages: int) -> tuple[int, ...] | None:
    """As many layers in each stage; None if they do not divide."""
    if model.layers % stages:
        return None
    share = model.layers // stages * model.units_a_layer
    inner = [1 + share * stage for stage in range(1, stages)]
    return (0, *inner, len(model.sequence))


def is_cut(border_bytes: np.ndarray) -> np.ndarray:
    """Behind which units a stage may end: [units] bool, true behind the last.

    Layers are cut where little crosses (Alpa, OSDI 2022, section 5.2: operators are
    clustered into layers with the least communication between them), so not where a
    unit earlier or later sends less than a third.

    Args:
      border_bytes: [units] what each hands to the next for an example.
    """
    inner = border_bytes[:-1]
    beside = np.concatenate([[np.inf], inner, [np.inf]])
    least = np.minimum(beside[:-2], beside[2:])
    return np.append(inner <= _EXCESS * least, True)


def balanced_bounds(
    busy: Sequence[np.ndarray],
    cuts: np.ndarray,
    held: Sequence[np.ndarray] | None = None,
    capacity: float = 0.0,
) -> tuple[int, ...] | None:
    """Contiguous units for each stage, so that the slowest is as fast as can be.

    Args:
      busy: [units] seconds by stage.
      cuts: [units] behind which units a stage may end, as `is_cut` has them.
      held: [units] bytes of state by stage, of which none has above `capacity`.
    """
    number = len(busy[0])
    ends = np.concatenate([[0], np.flatnonzero(cuts) + 1])
    if len(busy) >= len(ends):
        return None
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in busy]
    states = [np.concatenate([[0.0], np.cumsum(each)]) for each in held or ()]

    def deal(limit: float) -> tuple[int, ...] | None:
        bounds, start = [0], 0
        for index, total in enumerate(sums):
            left = len(sums) - index - 1
            end = int(
                np.searchsorted(total, total[start] + limit * (1 + 1e-9), "right")
            )
            end = min(end - 1, int(ends[-1 - left]))
            if states:
                most = states[index][start] + capacity
                end = min(end, int(np.searchsorted(states[index], most, "right")) - 1)
            end = int(ends[np.searchsorted(ends, end, "right") - 1])
            if end <= start:
                return None
            bounds.append(end)
            start = end
        return tuple(bounds) if start == number else None

    slowest = np.max(busy, axis=0)
    fastest = np.min(busy, axis=0)
    low = max(float(fastest.sum()) / len(busy), float(fastest.max()))
    high = float(slowest.sum()) / len(busy) + float(slowest.max())
    best = deal(high)
    if best is None:
        high = float(slowest.sum())
        best = deal(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = deal(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best
