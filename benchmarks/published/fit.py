"""Fits the three constants on the rows of one table, and says how far they carry.

The mean absolute relative error over the measured cells is minimised (Nelder and Mead
1965, on logarithms), and with it the mean *regret* of published plans: how much faster
the same stages would be with half or twice the microbatches, where these fit. Authors
publish the best they found, so a good model finds little better beside it. What each
column's search finds depends on the constants, so plans are chosen and constants fitted
in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.constants import NETWORK_EFFICIENCY, Constants
from benchmarks.published.pipeline_time import Simulator, best_plan
from benchmarks.published.simulated_plan import Plan
from benchmarks.published.systems import candidates
from benchmarks.published.table import Row

START = Constants(0.7, 40.0, 0.2, NETWORK_EFFICIENCY)
_LEAST = Constants(0.3, 1.0, 0.05)
_MOST = Constants(0.9, 400.0, 1.0)
_TURNS = 2
_STEPS = 60
NAMES = tuple(START.fitted())


@dataclass(frozen=True, eq=False)
class Sample:
    """A measured cell: its row, its column, what is to be predicted."""

    row: Row
    column: str
    tflops: float
    simulator: Simulator


def samples_of(
    rows: Sequence[Row], simulators: Mapping[int, Simulator]
) -> list[Sample]:
    """The cells that were measured, those that ran out of memory or were projected not.

    `simulators` are by place of the row.
    """
    return [
        Sample(row, cell.column, cell.tflops, simulators[place])
        for place, row in enumerate(rows)
        for cell in row.cells
        if cell.tflops is not None and not cell.is_projected
    ]


def fit(
    samples: Sequence[Sample], start: Constants = START, turns: int = _TURNS
) -> Constants:
    """The constants with the least mean absolute relative error on some cells."""
    found = start
    for _ in range(turns):
        plans = [_chosen(sample, found) for sample in samples]

        def loss(constants: Constants, plans: Sequence[Plan | None] = plans) -> float:
            pairs = zip(samples, plans, strict=True)
            error = np.mean([_error(s, p, constants) for s, p in pairs])
            given = (sample for sample in samples if sample.column in sample.row.plans)
            regrets = [_regret(sample, constants) for sample in given]
            return float(error + np.mean(regrets or [0.0]))

        found = _minimised(loss, found)
    return found


def _chosen(sample: Sample, constants: Constants) -> Plan | None:
    plans = candidates(sample.column, sample.row)
    best = best_plan(sample.simulator, plans, constants)
    return best.plan if best else None


def _error(sample: Sample, plan: Plan | None, constants: Constants) -> float:
    """Relative; 1 for a plan that should fit and does not."""
    outcome = sample.simulator.run(plan, constants) if plan else None
    if outcome is None:
        return 1.0
    return abs(sample.row.tflops(outcome.seconds) / sample.tflops - 1)


def _regret(sample: Sample, constants: Constants) -> float:
    """How many times less a published plan takes at its neighbours, beyond one."""
    (plan,) = candidates(sample.column, sample.row)
    number = plan.num_microbatches
    seconds = []
    for near in (number, max(number // 2, 1), 2 * number):
        found = sample.simulator.run(replace(plan, num_microbatches=near), constants)
        if found is not None and (found.is_feasible or near == number):
            seconds.append(found.seconds)
    return seconds[0] / min(seconds) - 1 if seconds else 0.0


def _minimised(loss: Callable[[Constants], float], start: Constants) -> Constants:
    """Nelder and Mead's simplex in logarithms, kept inside the bounds."""
    low, high = _logs(_LEAST), _logs(_MOST)

    def value(point: np.ndarray) -> float:
        inside = np.clip(point, low, high)
        return loss(_constants(inside)) + float(abs(point - inside).sum())

    first = _logs(start)
    points = [first, *(first + 0.25 * row for row in np.eye(len(first)))]
    values = [value(point) for point in points]
    for _ in range(_STEPS):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        reflected = 2 * centre - points[-1]
        reached = value(reflected)
        if reached < values[0]:
            further = 3 * centre - 2 * points[-1]
            beyond = value(further)
            if beyond < reached:
                reflected, reached = further, beyond
        elif reached >= values[-2]:
            reflected = 0.5 * (centre + points[-1])
            reached = value(reflected)
            if reached >= values[-1]:
                points = [points[0], *(0.5 * (points[0] + p) for p in points[1:])]
                values = [values[0], *(value(point) for point in points[1:])]
                continue
        points[-1], values[-1] = reflected, reached
    return _constants(np.clip(points[int(np.argmin(values))], low, high))


def _logs(constants: Constants) -> np.ndarray:
    return np.array([math.log(getattr(constants, name)) for name in NAMES])


def _constants(logs: np.ndarray) -> Constants:
    numbers = (float(f"{math.exp(value):.4g}") for value in logs)
    return replace(START, **dict(zip(NAMES, numbers, strict=True)))
