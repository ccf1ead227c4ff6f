"""Layers to stages and stages to submeshes: the step of a pipeline, at its fastest.

Layers 0 .. L-1 are cut into spans [i, j); each is a stage on a submesh. Submeshes are
taken in order from devices numbered host by host: a part of one host, or whole hosts.
A stage makes one of several choices c, each with a number of devices, and takes

  t  seconds a microbatch, forward and backward       `StageChoice.seconds[i, j]`
  a  seconds once a step, for the update              `StageChoice.once_seconds[i, j]`
  x  seconds for what crosses its upper border        `StageProblem.crossing_seconds`
  b  bytes: what it always holds, and so much for
     each microbatch in flight                        `StageChoice.fixed_bytes`, ...

With M microbatches, GPipe and eager 1F1B take (Alpa, Zheng et al. 2022, section 5.2)

  sum of (t + x)  +  (M - 1) * max of max(t, x)  +  max of a

Stage s from the end has M microbatches in flight of GPipe, of eager 1F1B min(M, 2s - 1)
and of 1F1B min(M, s); a stage over the capacity is no stage. As no more than s are in
the last s stages of 1F1B, it goes on no faster than their mean: there the pace is

  max of max(t, x, (sum of (t + x) of the last s stages) / s for each s < M)

An interleaved schedule gives each of P equal submeshes
v stages, s on s mod P, and takes, with (t + x) / v for each and v M - 1 more,

  sum of (t + x) / v  +  (v M - 1) * max of max(t, x)  +  v * max of a

The pace and `max a` are limits under which a dynamic program finds the least sum
(`stage_sums.py`): those of updates descend (`_solved`), and an interval of paces is
halved while the least sum at its upper end, at the pace of its lower end, would be
better than what is known (`_at_once`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from .stage_problem import Stage, StageProblem, slowest_seconds, step_seconds
from .stage_sums import Found, StageSums, least_paths, spans_only, sums_of

_ROUNDING = 1e-13


@dataclass(frozen=True)
class StageAssignment:
    """The stages, what a step takes, and a bound that no assignment goes below."""

    stages: tuple[Stage, ...]
    seconds: float
    bound: float


def solve_stages(
    problem: StageProblem, gap: float = 0.0, upper: float = inf
) -> StageAssignment | None:
    """The fastest stages up to a relative gap; None if there are none below `upper`.

    Arguments:
      gap: how much slower than the best the result may be, relative.
      upper: seconds of a plan that is known; slower ones are not looked for, nor those
        that are faster by less than the gap.
    """
    gap = max(gap, _ROUNDING)
    best = _solved(problem, sums_of(problem), gap, upper)
    if best is None:
        return None
    seconds = step_seconds(problem, best)
    return StageAssignment(best, seconds, seconds * (1 - gap - _ROUNDING))


def _solved(
    problem: StageProblem, every: Iterable[StageSums], gap: float, upper: float
) -> tuple[Stage, ...] | None:
    best: tuple[Stage, ...] | None = None
    spans = spans_only([each.once_seconds for each in problem.choices])
    least_once = problem.stages_per_submesh * float(spans.min())
    for sums in every:
        limit = inf
        while found := _at_once(problem, sums, limit, gap, upper - least_once):
            if (seconds := step_seconds(problem, found)) < upper:
                best, upper = found, seconds
            once = (
                problem.choices[each.choice].once_seconds[each.first, each.end]
                for each in found
            )
            limit = float(np.nextafter(max(once), -inf))
    return best


def _at_once(
    problem: StageProblem, sums: StageSums, once: float, gap: float, known: float
) -> tuple[Stage, ...] | None:
    """The stages of the least latency and pace whose updates keep to a limit.

    None if they do not take less than is `known` by more than the gap.
    """
    repeats = problem.stages_per_submesh * problem.num_microbatches - 1
    best: tuple[Stage, ...] | None = None
    lowest, latency = least_pace(problem), sums.least_total
    waiting = [(latency + repeats * lowest, lowest, inf, latency)]
    while waiting and waiting[0][0] < known * (1 - gap):
        _, low, high, latency = heapq.heappop(waiting)
        middle = (low + high) / 2
        found: Found | None = sums.least(middle, once, known - repeats * low)
        if found is not None:
            stages, own = found
            pace = slowest_seconds(problem, stages)
            if own + repeats * pace < known:
                best, known = stages, own + repeats * pace
            upper = min(pace, middle)  # rounding may put the one above the other
            if upper - low > _ROUNDING * upper:
                heapq.heappush(waiting, (own + repeats * low, low, upper, own))
        if middle < inf and high - middle > _ROUNDING * middle:
            entry = latency + repeats * middle, middle, high, latency
            heapq.heappush(waiting, entry)
    return best


def least_pace(problem: StageProblem) -> float:
    """A bound below the pace of any assignment.

    Stages share out the devices, so it is at least the least device-seconds of all
    layers over the number of devices.
    """
    work = np.array([each.num_devices * each.seconds for each in problem.choices])
    least = np.min(work, axis=0, where=problem.held >= 1, initial=inf)
    shared = problem.stages_per_submesh * problem.num_devices
    return float(least_paths(least)[-1]) / shared


def least_step_seconds(problem: StageProblem) -> float:
    """A bound below what any assignment takes, found without one."""
    shared, choices = problem.stages_per_submesh, problem.choices
    seconds = np.array([each.seconds for each in choices])
    least = np.min(seconds, axis=0, where=problem.held >= 1, initial=inf)
    latency = float(least_paths(least)[-1]) / shared
    once = float(spans_only([each.once_seconds for each in choices]).min())
    repeats = shared * problem.num_microbatches - 1
    return latency + repeats * least_pace(problem) + shared * once
