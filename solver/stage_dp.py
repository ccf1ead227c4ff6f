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

Zero bubble (Qi et al. 2023, section 2) runs W tasks w, which no lower stage waits
for, while it would wait; f is forward, b what is left. Stages but the first then count
in the sum as (t - 2 w) or more of f and b (ZB-H1), and as t - 3 w or more of f (ZB-H2),
so that of equal stages the wait is p - 1 times that. All p stages have min(M, p) in
flight of ZB-H1 and 2 p - 1 of ZB-H2; there are no more stages than M fills.

`max t` and `max a` are enumerated (`_at_once`, `run`), each value a limit under which a
dynamic program finds the least sum (`stage_sums.py`). The pace starts at the least that
is feasible, found by bisection; what is left is bounded by the least sum of all, so few
values are tried. `gap` lets values lie so far apart that no plan is better by more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .stage_interleaving import interleaved_sums
from .stage_problem import (
    ZERO_BUBBLE,
    Stage,
    StageProblem,
    most_stages,
    slowest_seconds,
    step_seconds,
)
from .stage_spans import least_paths, spans_only
from .stage_sums import PlainSums, StageSums

_MOST_NUMBERS = 8  # of zero-bubble stages that are looked at apart
_ROUNDING = 1e-12


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
    if problem.schedule in ZERO_BUBBLE:
        return _zero_bubble(problem, gap, upper)
    if problem.schedule != "interleaved":
        return _Search(problem, PlainSums(problem), gap, upper).run()
    every = sorted(interleaved_sums(problem), key=lambda each: each.least_seconds)
    return _best_of(problem, every, gap, upper)


def _best_of(
    problem: StageProblem,
    every: Iterable[StageSums],
    gap: float,
    upper: float,
    best: StageAssignment | None = None,
) -> StageAssignment | None:
    """The fastest stages of several programs, or `best`; the bound is of them all."""
    for sums in every:
        if sums.least_seconds >= upper * (1 - gap):
            continue
        found = _Search(problem, sums, gap, upper).run()
        if found is not None:
            best, upper = found, found.seconds
    if best is None:
        return None
    return replace(best, bound=best.seconds * (1 - gap - _ROUNDING))


def _zero_bubble(
    problem: StageProblem, gap: float, upper: float
) -> StageAssignment | None:
    """First as if each stage held what the last ones must; if that is too little for
    stages on the way, for each number of stages apart, the nearest to theirs."""
    sums = PlainSums(problem)
    search = _Search(problem, sums, gap, upper)
    best, wanted = search.run(), search.too_full
    if wanted is None:
        return best
    upper = upper if best is None else best.seconds
    numbers = range(problem.min_stages, most_stages(problem) + 1)
    nearest = sorted(numbers, key=lambda each: abs(each - wanted))[:_MOST_NUMBERS]
    return _best_of(problem, map(sums.of, nearest), gap, upper, best)


class _Search:
    def __init__(
        self,
        problem: StageProblem,
        sums: StageSums,
        gap: float,
        upper: float,
    ) -> None:
        self.problem, self.sums = problem, sums
        self.gap, self.best_seconds = gap, upper
        self.best: tuple[Stage, ...] | None = None
        self.too_full: int | None = None  # stages met that hold more than was asked for

    def run(self) -> StageAssignment | None:
        least_once = self.problem.stages_per_submesh * self.sums.least_once
        once_limit = inf
        while True:
            found = self._at_once(once_limit, least_once)
            if found is None:
                break
            stages, seconds = found
            once = max(self._once(stage) for stage in stages)
            if seconds + least_once >= self.best_seconds * (1 - self.gap):
                break
            once_limit = np.nextafter(once, -inf)
        if self.best is None:
            return None
        bound = self.best_seconds * (1 - self.gap - _ROUNDING)
        return StageAssignment(self.best, self.best_seconds, bound)

    def _once(self, stage: Stage) -> float:
        choice = self.problem.choices[stage.choice]
        return float(choice.once_seconds[stage.first, stage.end])

    def _at_once(
        self, once_limit: float, least_once: float
    ) -> tuple[tuple[Stage, ...], float] | None:
        """The stages of the least latency and pace whose updates keep to the limit."""
        repeats = self.problem.stages_per_submesh * self.problem.num_microbatches - 1
        least_sum = self.sums.least_total
        paces, below = self.sums.paces, 0.0
        limit = self.best_seconds - least_once
        if limit < inf:  # slower paces cannot be better than what is known
            room = limit * (1 - self.gap) - least_sum
            if room <= 0:
                return None
            paces = paces[paces * repeats <= room]
        paces = self._thinned(paces)
        first = self._first_feasible(paces, once_limit)
        if first is None:
            return None
        best: tuple[tuple[Stage, ...], float] | None = None
        if first:
            below = np.nextafter(paces[first - 1], inf)
        for pace in paces[first:]:
            floor = least_sum + repeats * below
            known = min(limit, best[1] if best is not None else inf)
            if floor >= known * (1 - self.gap):
                break
            ceiling = known - repeats * below
            for stages, seconds in self._at_pace(pace, below, once_limit, ceiling):
                if best is None or seconds < best[1]:
                    best = stages, seconds
                total = step_seconds(self.problem, stages)
                if total == inf:
                    self.too_full = self.too_full or len(stages)
                if total < self.best_seconds:
                    self.best, self.best_seconds = stages, total
                    limit = total - least_once
            below = np.nextafter(pace, inf)
        return best

    def _at_pace(
        self, pace: float, below: float, once_limit: float, ceiling: float
    ) -> Iterator[tuple[tuple[Stage, ...], float]]:
        """The stages of the least latency at a pace, and at those down to `below`, with
        the seconds that they take without an update."""
        repeats = self.problem.stages_per_submesh * self.problem.num_microbatches - 1
        while pace >= below:
            found = self.sums.least(pace, once_limit, ceiling)
            if found is None:
                return
            stages, latency = found
            slowest = slowest_seconds(self.problem, stages)
            yield stages, latency + repeats * slowest
            if not self.sums.has_others:
                return
            pace = slowest * (1 - max(self.gap, 4 * _ROUNDING))

    def _first_feasible(self, paces: Sequence[float], once_limit: float) -> int | None:
        """The place of the least feasible pace, looked for from a bound on."""

        def fits(place: int) -> bool:
            return self.sums.is_feasible(paces[min(place, high)], once_limit)

        def may_fit(place: int) -> bool:
            return self.sums.may_be_feasible(paces[place], once_limit)

        if not len(paces):
            return None
        high, step = len(paces) - 1, 1
        low = _first_of(may_fit, 0, high)
        while not fits(low + step - 1):
            low, step = low + step, 2 * step
            if low > high:
                return None
        return _first_of(fits, low, min(low + step - 1, high))

    def _thinned(self, paces: np.ndarray) -> list[float]:
        """Values so far apart that the gap allows it, the first and last kept."""
        kept, position = [float(pace) for pace in paces[:1]], 0
        while position < len(paces) - 1:
            further = np.searchsorted(paces, kept[-1] * (1 + self.gap), "right") - 1
            position = max(position + 1, int(further))
            kept.append(float(paces[position]))
        return kept


def _first_of(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """The first place of which it is true, if it is so from there to `high` on."""
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def least_step_seconds(problem: StageProblem) -> float:
    """A bound below what any assignment takes, found without one.

    Stages share out the devices, so the pace is at least the least device-seconds of
    all layers over the number of devices.
    """
    shared = problem.stages_per_submesh
    fits, choices = problem.held >= 1, problem.choices
    seconds = np.array(problem.latencies)
    work = np.array([each.num_devices * each.seconds for each in choices])
    least = [np.min(each, 0, where=fits, initial=inf) for each in (seconds, work)]
    latency, device_seconds = least_paths(np.array(least))[:, -1] / shared
    once = spans_only([each.once_seconds for each in choices]).min()
    repeats = shared * problem.num_microbatches - 1
    pace = device_seconds / problem.num_devices
    return float(latency + repeats * pace + shared * once)
