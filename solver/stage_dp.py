"""Layers to stages and stages to submeshes: the step of a pipeline, at its fastest.

Layers 0 .. L-1 are cut into spans [i, j); each is a stage on a submesh. Submeshes are
taken in order from devices numbered host by host: a part of one host, or whole hosts.
A stage makes one of several choices c, each with a number of devices, and takes

  t  seconds a microbatch, forward and backward       `StageChoice.seconds[i, j]`
  a  seconds once a step, for the update              `StageChoice.once_seconds[i, j]`
  x  seconds for what crosses its upper border        `StageProblem.crossing_seconds`
  b  bytes: what it always holds, and so much for
     each microbatch in flight                        `StageChoice.fixed_bytes`, ...

With M microbatches, 1F1B and GPipe take (Alpa, Zheng et al. 2022, section 5.2)

  sum of (t + x)  +  (M - 1) * max of max(t, x)  +  max of a

Stage s from the end of a 1F1B has min(M, s) microbatches in flight, of GPipe M; a stage
over the capacity is no stage. An interleaved schedule gives each of P equal submeshes
v stages, s on s mod P, and takes, with (t + x) / v for each and v M - 1 more,

  sum of (t + x) / v  +  (v M - 1) * max of max(t, x)  +  v * max of a

`max t` and `max a` are enumerated (`_at_once`, `run`), each value a limit under
which a dynamic program over (stages left, first layer, first device, devices of the
first stage) finds the least sum (`_least_sum`). The pace starts at the least that is
feasible, found by bisection; what is left is bounded by the least sum of all, so few
values are tried. `gap` lets values lie so far apart that no plan is better by more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .stage_problem import (
    ScheduleName,
    Stage,
    StageChoice,
    StageProblem,
    microbatches_in_flight,
    sharing_devices,
    step_seconds,
)


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
      upper: seconds of a plan that is known; slower ones are not looked for.
    """
    if problem.schedule != "interleaved":
        return _Search(problem, gap, upper).run()
    found = []
    for index, choice in enumerate(problem.choices):
        search = _Search(problem, gap, upper, index)
        number = search.num_submeshes
        if number >= 2 and problem.num_microbatches % number == 0:
            result = search.run()
            if result is not None:
                found.append(result)
                upper = min(upper, result.seconds)
        assert choice.num_devices > 0
    return min(found, key=lambda each: each.seconds, default=None)


_END = 0  # stands for the size of the stage behind the last
_Key = tuple[int, bool, int]  # choice, border between hosts, devices that share it


def _shared(own: int, following: int) -> int:
    """How many devices share what crosses between a stage and the next."""
    return own if following == _END else min(own, following)


@dataclass
class _Step:
    """The least sum from every (first layer, first device) on, and how it goes on."""

    cost: np.ndarray
    choice: np.ndarray
    end: np.ndarray
    next_size: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> _Step:
        return cls(np.full(shape, inf), *(np.zeros(shape, np.int32) for _ in range(3)))

    def improve(
        self,
        where: tuple[np.ndarray, ...],
        least: np.ndarray,
        choice: int,
        end: np.ndarray,
        sizes: np.ndarray,
    ) -> None:
        """Take over what costs less; `sizes` are those of the next stage, by end."""
        better = least < self.cost[where]
        following = np.take_along_axis(sizes, end, axis=0)
        self.cost[where] = np.where(better, least, self.cost[where])
        self.choice[where] = np.where(better, choice, self.choice[where])
        self.end[where] = np.where(better, end, self.end[where])
        self.next_size[where] = np.where(better, following, self.next_size[where])


class _Search:
    """One problem; with `only`, an interleaved one in which all make this choice."""

    def __init__(
        self, problem: StageProblem, gap: float, upper: float, only: int | None = None
    ) -> None:
        self.problem, self.gap, self.best_seconds = problem, gap, upper
        self.best: tuple[Stage, ...] | None = None
        self.only, size = only, problem.num_layers + 1
        self.choices = range(len(problem.choices)) if only is None else [only]
        self.most = min(problem.num_layers, problem.num_devices)
        self.least = problem.min_stages
        self.num_submeshes = 0
        if only is not None:
            own = problem.choices[only].num_devices
            self.num_submeshes = problem.num_devices // own
            self.least = self.most = self.num_submeshes * problem.stages_per_submesh
        elif problem.max_stages is not None:
            self.most = min(self.most, problem.max_stages)
        is_span = np.triu(np.ones((size, size), bool), 1)
        sizes = {problem.choices[c].num_devices for c in self.choices}
        self.latency: dict[_Key, np.ndarray] = {}
        self.pace: dict[_Key, np.ndarray] = {}
        self.allowed: dict[int, np.ndarray] = {}
        self.starts: dict[tuple[int, bool], np.ndarray] = {}
        devices = np.arange(problem.num_devices)
        for index in self.choices:
            choice = problem.choices[index]
            seconds = np.where(is_span, choice.seconds, inf)
            room = problem.capacity_bytes
            room = room - problem.stages_per_submesh * choice.fixed_bytes
            with np.errstate(divide="ignore", invalid="ignore"):
                most = np.floor(room / choice.microbatch_bytes * (1 + 1e-12))
            most = np.where(choice.microbatch_bytes > 0, most, inf)
            self.allowed[index] = np.where(room >= 0, most, -1.0)
            legal = np.array([problem.may_start(choice, int(d)) for d in devices])
            ends = (devices + choice.num_devices) % problem.devices_per_host == 0
            for between in (False, True):
                self.starts[index, between] = np.flatnonzero(legal & (ends == between))
                for width in (n for n in sizes if n <= choice.num_devices):
                    crossing = problem.crossing(width, between)
                    self.latency[index, between, width] = seconds + crossing
                    self.pace[index, between, width] = np.maximum(seconds, crossing)

    def run(self) -> StageAssignment | None:
        bound = self._least_total(inf, inf)
        if bound == inf:
            return None
        least_once = min(
            float(self.problem.choices[index].once_seconds[np.isfinite(p)].min())
            for (index, *_), p in self.pace.items()
            if np.isfinite(p).any()
        )
        once_limit, shared = inf, self.problem.stages_per_submesh
        while True:
            found = self._at_once(once_limit, shared * least_once)
            if found is None:
                break
            stages, seconds = found
            once = max(self._once(stage) for stage in stages)
            if seconds + shared * least_once >= self.best_seconds * (1 - self.gap):
                break
            once_limit = np.nextafter(once, -inf)
        if self.best is None:
            return None
        return StageAssignment(
            self.best, self.best_seconds, min(bound, self.best_seconds)
        )

    def _once(self, stage: Stage) -> float:
        choice = self.problem.choices[stage.choice]
        return float(choice.once_seconds[stage.first, stage.end])

    def _at_once(
        self, once_limit: float, least_once: float
    ) -> tuple[tuple[Stage, ...], float] | None:
        """The stages of the least latency and pace whose updates keep to the limit."""
        paces = np.unique(
            np.concatenate([p[np.isfinite(p)] for p in self.pace.values()])
        )
        repeats = self.problem.stages_per_submesh * self.problem.num_microbatches - 1
        least_sum = self._least_total(inf, once_limit)
        if self.best_seconds < inf:  # slower paces cannot be better than what is known
            room = (self.best_seconds - least_once) * (1 - self.gap) - least_sum
            if room <= 0:
                return None
            paces = paces[paces * repeats <= room]
        first = self._first_feasible(paces, once_limit)
        if first is None:
            return None
        best: tuple[tuple[Stage, ...], float] | None = None
        below = paces[first]
        for pace in self._thinned(paces[first:]):
            floor = least_sum + repeats * below
            limit = self.best_seconds - least_once
            known = min(limit, best[1] if best is not None else inf)
            if floor >= known * (1 - self.gap) and best is not None:
                break
            if floor >= limit * (1 - self.gap):
                break
            below = np.nextafter(pace, inf)
            found = self._least_sum(pace, once_limit)
            if found is None:
                continue
            stages, latency = found
            slowest = max(self._pace(stages, index) for index in range(len(stages)))
            seconds = latency + repeats * slowest
            if best is None or seconds < best[1]:
                best = stages, seconds
            total = step_seconds(self.problem, stages)
            if total < self.best_seconds:
                self.best, self.best_seconds = stages, total
        return best

    def _pace(self, stages: Sequence[Stage], index: int) -> float:
        stage = stages[index]
        upper = stage.device + self.problem.choices[stage.choice].num_devices
        if self.only is not None:
            upper %= self.problem.choices[stage.choice].num_devices * self.num_submeshes
        between = upper % self.problem.devices_per_host == 0
        width = sharing_devices(self.problem, stages, index)
        return float(self.pace[stage.choice, between, width][stage.first, stage.end])

    def _first_feasible(self, paces: np.ndarray, once_limit: float) -> int | None:
        low, high = 0, len(paces) - 1
        if not len(paces) or self._least_total(paces[high], once_limit) == inf:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._least_total(paces[middle], once_limit) < inf:
                high = middle
            else:
                low = middle + 1
        return low

    def _thinned(self, paces: np.ndarray) -> list[float]:
        """Values so far apart that the gap allows it, the first and last kept."""
        kept = [float(paces[0])]
        for position, pace in enumerate(paces[1:], 1):
            is_last = position == len(paces) - 1
            if is_last or paces[position + 1] > kept[-1] * (1 + self.gap):
                kept.append(float(pace))
        return kept

    def _least_total(self, pace: float, once: float) -> float:
        found = self._least_sum(pace, once)
        return inf if found is None else found[1]

    def _least_sum(
        self, pace: float, once: float
    ) -> tuple[tuple[Stage, ...], float] | None:
        """The stages of the least latency in all, under limits of pace and update."""
        costs = {
            key: np.where(
                (self.pace[key] <= pace)
                & (self.problem.choices[key[0]].once_seconds <= once),
                latency,
                inf,
            )
            for key, latency in self.latency.items()
        }
        if self.only is not None:
            return self._interleaved(costs)
        problem, shape = self.problem, (self.problem.num_layers + 1,)
        shape = (*shape, problem.num_devices + 1)
        done = np.full(shape, inf)
        done[problem.num_layers] = 0.0
        reached: dict[int, np.ndarray] = {_END: done}
        before: list[dict[int, _Step]] = []
        best, best_stages, best_size = inf, 0, _END
        for left in range(1, self.most + 1):
            held = microbatches_in_flight(problem, 0, left)
            steps: dict[int, _Step] = {}
            for (index, between, width), cost in costs.items():
                own = problem.choices[index].num_devices
                starts = self.starts[index, between]
                next_sizes = [n for n in reached if _shared(own, n) == width]
                if not len(starts) or not next_sizes:
                    continue
                every = np.stack([reached[n][:, starts + own] for n in next_sizes])
                after = every.min(axis=0)
                useful = np.isfinite(after).any(axis=0)
                cost = np.where(self.allowed[index] >= held, cost, inf)
                rows = np.flatnonzero(np.isfinite(cost).any(axis=1))
                if not useful.any() or not len(rows):
                    continue
                places, after = starts[useful], after[:, useful]
                sizes = np.array(next_sizes)[every.argmin(axis=0)[:, useful]]
                through = cost[rows][:, :, None] + after[None]
                end = through.argmin(axis=1)
                least = np.take_along_axis(through, end[:, None], axis=1)[:, 0]
                step = steps.setdefault(own, _Step.empty(shape))
                step.improve(np.ix_(rows, places), least, index, end, sizes)
            before.append(steps)
            reached = {n: step.cost for n, step in steps.items()}
            for number, step in steps.items():
                if left >= self.least and step.cost[0, 0] < best:
                    best, best_stages = float(step.cost[0, 0]), left
                    best_size = number
            if not reached:
                break
        if best == inf:
            return None
        stages, first, device, number = [], 0, 0, best_size
        for steps in reversed(before[:best_stages]):
            step, place = steps[number], (first, device)
            stages.append(
                Stage(first, int(step.end[place]), device, int(step.choice[place]))
            )
            first, device = int(step.end[place]), device + number
            number = int(step.next_size[place])
        return tuple(stages), best

    def _interleaved(
        self, costs: dict[_Key, np.ndarray]
    ) -> tuple[tuple[Stage, ...], float] | None:
        """All stages under one choice, stage s on submesh s mod their number."""
        problem, index, total = self.problem, self.only, self.most
        assert index is not None
        own = problem.choices[index].num_devices
        legal = all(
            problem.may_start(problem.choices[index], i * own)
            for i in range(self.num_submeshes)
        )
        if total > problem.num_layers or not legal:
            return None
        reached = np.full(problem.num_layers + 1, inf)
        reached[problem.num_layers] = 0.0
        before: list[np.ndarray] = []
        for stage in reversed(range(total)):
            upper = (stage + 1) % self.num_submeshes * own
            held = microbatches_in_flight(problem, stage, total)
            cost = costs[index, upper % problem.devices_per_host == 0, own]
            cost = np.where(self.allowed[index] >= held, cost, inf)
            through = cost + reached[None]
            before.append(through.argmin(axis=1))
            reached = through.min(axis=1)
        if reached[0] == inf:
            return None
        stages, first = [], 0
        for number, ends in enumerate(reversed(before)):
            end = int(ends[first])
            device = number % self.num_submeshes * own
            stages.append(Stage(first, end, device, index))
            first = end
        return tuple(stages), float(reached[0]) / problem.stages_per_submesh


def best_over(
    problem: StageProblem,
    choices_of: Callable[[int], tuple[tuple[StageChoice, ...], np.ndarray]],
    microbatch_counts: Sequence[int],
    schedules: Sequence[tuple[ScheduleName, int]],
    gap: float = 0.0,
) -> tuple[StageProblem, StageAssignment] | None:
    """The fastest stages over numbers of microbatches and schedules.

    Arguments:
      choices_of: choices and `crossing_seconds` for a number of microbatches.
      schedules: names, with how many stages share a submesh.
    """
    best: tuple[StageProblem, StageAssignment] | None = None
    for number in microbatch_counts:
        choices, crossing = choices_of(number)
        for schedule, shared in schedules:
            each = replace(
                problem,
                choices=choices,
                crossing_seconds=crossing,
                num_microbatches=number,
                schedule=schedule,
                stages_per_submesh=shared,
            )
            found = solve_stages(each, gap, inf if best is None else best[1].seconds)
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best = each, found
    return best
