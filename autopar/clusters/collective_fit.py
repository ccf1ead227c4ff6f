"""Fits the constants of a link to measured collectives.

The model of `costs/collectives.py`: launch + alpha * steps + beta * wire * bytes. Each
kind is first fitted alone, as a constant and a slope for each group size, by least
squares of relative errors. One launch, one alpha and one beta are then the best for all
kinds together, and what a kind differs by becomes its two factors.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.collectives import num_steps, wire_bytes
from .hardware import COLLECTIVE_KINDS, CollectiveKind, Link

_LEAST_SECONDS = 1e-7
_LEAST_SLOPE = 1e-13


@dataclass(frozen=True)
class Timing:
    """Seconds of one collective with a result of some bytes on each device."""

    kind: CollectiveKind
    group_size: int
    result_bytes: float
    seconds: float


@dataclass(frozen=True)
class _Line:
    """One kind in one group size: seconds = constant + slope * wire bytes."""

    kind: CollectiveKind
    group_size: int
    constant: float
    slope: float


def fit_links(timings: Sequence[Timing], name: str) -> tuple[float, Link]:
    """What launching a collective costs, and the link that all devices share.

    Args:
      timings: of every kind, at two sizes or more each.
      name: of the link.

    Returns:
      (launch_seconds, link)
    """
    lines = _lines(timings)
    launch, alpha = _constants(lines)
    beta = max(statistics.median(line.slope for line in lines), _LEAST_SLOPE)
    factors = {}
    for kind in COLLECTIVE_KINDS:
        own = [line for line in lines if line.kind == kind]
        latencies = [
            line.constant / (launch + alpha * num_steps(kind, line.group_size))
            for line in own
        ]
        slopes = [line.slope / beta for line in own]
        pair = [max(float(np.mean(each)), 0.01) for each in (latencies, slopes)]
        factors[kind] = tuple(float(f"{each:.3g}") for each in pair)
    bandwidth = float(f"{1 / beta:.4g}")
    link = Link(name, float(f"{alpha:.4g}"), bandwidth, 1.0, factors)
    return float(f"{launch:.4g}"), link


def _lines(timings: Sequence[Timing]) -> list[_Line]:
    groups: dict[tuple[CollectiveKind, int], list[Timing]] = {}
    for timing in timings:
        groups.setdefault((timing.kind, timing.group_size), []).append(timing)
    lines = []
    for (kind, group_size), own in groups.items():
        wire = np.array([wire_bytes(kind, t.result_bytes, group_size) for t in own])
        constant, slope = _fit(wire, np.array([t.seconds for t in own]))
        lines.append(_Line(kind, group_size, constant, slope))
    return lines


def _fit(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """A constant and a slope, neither below zero, by relative least squares."""
    ones = np.ones_like(seconds)
    rows = np.stack([ones, sizes], axis=1) / seconds[:, None]
    (constant, slope), *_ = np.linalg.lstsq(rows, ones, rcond=None)
    if constant < 0 or slope < 0:  # then one of them explains what there is
        flat, steep = (float(np.linalg.lstsq(rows[:, [i]], ones)[0][0]) for i in (0, 1))
        constant, slope = (flat, 0.0) if slope < 0 else (0.0, steep)
    return max(float(constant), _LEAST_SECONDS), max(float(slope), 0.0)


def _constants(lines: Sequence[_Line]) -> tuple[float, float]:
    """Launch and alpha: the constants of all lines by the steps that they take."""
    steps = np.array([num_steps(line.kind, line.group_size) for line in lines], float)
    constants = np.array([line.constant for line in lines])
    launch, alpha = _fit(steps, constants)
    return launch, alpha
