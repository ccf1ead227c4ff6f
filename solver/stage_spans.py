"""Times of spans of layers, as arrays: which may be stages, and sums over spans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np

from .stage_problem import StageChoice, StageProblem


def microbatches_held(problem: StageProblem, choice: StageChoice) -> np.ndarray:
    """How many microbatches each span may have in flight: [L + 1, L + 1].

    Negative where it does not even hold what it always holds.
    """
    room = problem.capacity_bytes - problem.stages_per_submesh * choice.fixed_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(room / choice.microbatch_bytes * (1 + 1e-12))
    most = np.where(choice.microbatch_bytes > 0, most, inf)
    return np.where(room >= 0, most, -1.0)


def held_spans(problem: StageProblem, choice: StageChoice) -> np.ndarray:
    """Times of spans that hold a microbatch; all else is infinite: [L + 1, L + 1]."""
    fits = microbatches_held(problem, choice) >= 1
    return np.where(fits, spans_only([choice.seconds])[0], inf)


def least_paths(costs: np.ndarray) -> np.ndarray:
    """The least sums of [L + 1, L + 1] over spans that follow each other from 0 on, to
    each border: [L + 1]."""
    reached = np.full(len(costs), inf)
    reached[0] = 0.0
    for end in range(1, len(costs)):
        reached[end] = (reached[:end] + costs[:end, end]).min()
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
    size = spans.shape[-1]
    found = np.full((*spans.shape[:-1], longest), inf)
    for length in range(1, longest + 1):
        ends = np.arange(length, size)
        found[..., ends - length, length - 1] = spans[..., ends - length, ends]
    return found


def finite_values(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All finite entries of arrays, each once, ascending."""
    every = np.concatenate([each.ravel() for each in arrays])
    return np.unique(every[np.isfinite(every)])


def least_once_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The least update of any span: of (times, updates), where times are finite."""
    return min(
        float(once[np.isfinite(seconds)].min(initial=inf)) for seconds, once in pairs
    )
