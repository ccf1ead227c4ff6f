"""Times of spans of layers, as arrays: which may be stages, and sums over spans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np


def least_paths(costs: np.ndarray) -> np.ndarray:
    """The least sums of [.., L + 1, L + 1] over spans that follow each other from 0 on,
    to each border: [.., L + 1]."""
    reached = np.full(costs.shape[:-1], inf)
    reached[..., 0] = 0.0
    for end in range(1, costs.shape[-1]):
        through = reached[..., :end] + costs[..., :end, end]
        reached[..., end] = through.min(axis=-1)
    return reached


def spans_only(seconds: Sequence[np.ndarray]) -> np.ndarray:
    """Times of spans with a layer or more; all else is infinite."""
    stacked = np.array(seconds)
    return np.where(_is_span(stacked.shape[-1]), stacked, inf)


@lru_cache
def _is_span(size: int) -> np.ndarray:
    return np.triu(np.ones((size, size), bool), 1)


def by_length(spans: np.ndarray, longest: int) -> np.ndarray:
    """[.., i, j] as [.., i, j - i - 1]; infinite where j is beyond the last layer."""
    first = np.arange(spans.shape[-1])[:, None]
    ends = first + np.arange(1, longest + 1)
    is_span = ends < spans.shape[-1]
    return np.where(is_span, spans[..., first, np.where(is_span, ends, 0)], inf)


def finite_values(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All finite entries of arrays, each once, ascending."""
    every = np.concatenate([each.ravel() for each in arrays])
    return np.unique(every[np.isfinite(every)])


def least_once_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The least update of any span: of (times, updates), where times are finite."""
    return min(
        float(once[np.isfinite(seconds)].min(initial=inf)) for seconds, once in pairs
    )
