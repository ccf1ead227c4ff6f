"""The least latency of stages under limits of pace and update, over all assignments.

With f[k, g, i, d] the least latency of k stages that hold layers i .. L-1, of which the
first makes a choice of group g (equally many devices n of one kind) from device d on,

  f[k, g, i, d] = min over j of  t[g, i, j] + min over h of  x[g, h, j, d + n]
                                                             + f[k - 1, h, j, d + n]

t is the least of the group's choices that hold k microbatches in flight, x what crosses
the border. Times above the pace, and spans whose update is above its limit, count as
infinite. Choices meet in t, so the program is as large as there are sizes of submeshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from .stage_problem import (
    Stage,
    StageChoice,
    StageProblem,
    microbatches_in_flight,
)


class StageSums(Protocol):
    """What the enumeration of limits asks.

    `paces` are all values that the pace can have, ascending; `least_once` is the least
    update of any span.
    """

    paces: np.ndarray
    least_once: float

    def total(self, pace: float, once: float) -> float:
        """The least latency under the limits; infinite if there is none."""
        ...

    def is_feasible(self, pace: float, once: float) -> bool:
        """Whether there is any under the limits."""
        ...

    def least(self, pace: float, once: float) -> tuple[tuple[Stage, ...], float] | None:
        """The stages of the least latency under the limits, and that latency."""
        ...


def plain_sums(problem: StageProblem) -> StageSums:
    """For 1F1B and GPipe: a submesh for every stage."""
    return _Plain(problem)


def interleaved_sums(problem: StageProblem, choice: int) -> StageSums | None:
    """For stages that all make one choice and share submeshes in turns, if they can."""
    sums = _Interleaved(problem, choice)
    return sums if sums.is_possible else None


def microbatches_held(problem: StageProblem, choice: StageChoice) -> np.ndarray:
    """How many microbatches each span may have in flight: [L + 1, L + 1].

    Negative where it does not even hold what it always holds.
    """
    room = problem.capacity_bytes - problem.stages_per_submesh * choice.fixed_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(room / choice.microbatch_bytes * (1 + 1e-12))
    most = np.where(choice.microbatch_bytes > 0, most, inf)
    return np.where(room >= 0, most, -1.0)


@dataclass(frozen=True, eq=False)
class _Group:
    """Choices of one number of devices of one kind.

    Arrays are [choices, first layer, length - 1], up to the longest span that holds a
    microbatch. `crossing` is [next group, border, start]; stages begin at `starts`.
    """

    choices: tuple[int, ...]
    seconds: np.ndarray
    once: np.ndarray
    allowed: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    crossing: np.ndarray

    @classmethod
    def of(
        cls, problem: StageProblem, choices: Sequence[int], next_sizes: Sequence[int]
    ) -> _Group:
        own = [problem.choices[index] for index in choices]
        number, inside = own[0].num_devices, problem.devices_per_host
        starts = np.array(
            [d for d in range(problem.num_devices) if problem.may_start(own[0], d)],
            int,
        )
        ends = starts + number
        crossing = np.zeros((len(next_sizes), problem.num_layers + 1, len(starts)))
        for position, size in enumerate(next_sizes):
            for between in (False, True):
                seconds = problem.crossing(min(number, size), between)
                crossing[position][:, (ends % inside == 0) == between] = seconds[
                    :, None
                ]
        allowed = np.array([microbatches_held(problem, each) for each in own])
        seconds = _spans([each.seconds for each in own])
        _, first, end = np.nonzero(np.isfinite(seconds) & (allowed >= 1))
        longest = int((end - first).max(initial=1))
        once = np.array([each.once_seconds for each in own])
        return cls(
            tuple(choices),
            _by_length(seconds, longest),
            _by_length(once, longest),
            _by_length(allowed, longest),
            starts,
            ends,
            crossing,
        )

    def limited(self, pace: float, once: float) -> np.ndarray:
        """Times under the limits; the others are infinite."""
        is_allowed = (self.seconds <= pace) & (self.once <= once)
        return np.where(is_allowed, self.seconds, inf)


def _spans(seconds: Sequence[np.ndarray]) -> np.ndarray:
    """Times of spans with a layer or more; all else is infinite."""
    stacked = np.array(seconds)
    is_span = np.triu(np.ones(stacked.shape[1:], bool), 1)
    return np.where(is_span, stacked, inf)


def _by_length(spans: np.ndarray, longest: int) -> np.ndarray:
    """[.., i, j] as [.., i, j - i - 1]; infinite where j is beyond the last layer."""
    size = spans.shape[-1]
    found = np.full((*spans.shape[:-1], longest), inf)
    for length in range(1, longest + 1):
        ends = np.arange(length, size)
        found[..., ends - length, length - 1] = spans[..., ends - length, ends]
    return found


def _then(costs: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The least sum of a span and what comes behind it: [L + 1, starts].

    `costs` are [first layer, length - 1], `after` is [border, starts].
    """
    size, longest = costs.shape
    padded = np.full((size + longest, after.shape[1]), inf)
    padded[:size] = after
    row, column = padded.strides
    shape, strides = (size, longest, after.shape[1]), (row, row, column)
    behind = np.ndarray(shape, float, padded, row, strides)
    return (costs[:, :, None] + behind).min(axis=1)


class _Plain:
    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        alike: dict[tuple[int, int], list[int]] = {}
        for index, choice in enumerate(problem.choices):
            alike.setdefault((choice.num_devices, choice.kind), []).append(index)
        sizes = [number for number, _ in alike]
        every = [_Group.of(problem, own, sizes) for own in alike.values()]
        self.groups = every
        self.most = min(problem.num_layers, problem.num_devices)
        if problem.max_stages is not None:
            self.most = min(self.most, problem.max_stages)
        spans = [g.seconds[g.allowed >= 1] for g in every]
        self.paces = _values([*spans, *(g.crossing for g in every)])
        self.least_once = _least_once([(g.seconds, g.once) for g in every])

    def total(self, pace: float, once: float) -> float:
        return self._best(list(self._levels(pace, once)))[0]

    def is_feasible(self, pace: float, once: float) -> bool:
        least = self.problem.min_stages
        return any(
            left >= least and level[:, 0, 0].min() < inf
            for left, level in enumerate(self._levels(pace, once), 1)
        )

    def least(self, pace: float, once: float) -> tuple[tuple[Stage, ...], float] | None:
        levels = list(self._levels(pace, once))
        seconds, most, index = self._best(levels)
        if seconds == inf:
            return None
        stages: list[Stage] = []
        first = device = 0
        for left in range(most, 0, -1):
            group = self.groups[index]
            start = int(np.flatnonzero(group.starts == device)[0])
            held = microbatches_in_flight(self.problem, 0, left)
            rows = group.limited(pace, once)[:, first]
            rows = np.where(group.allowed[:, first] >= held, rows, inf)
            ends = np.arange(first + 1, first + 1 + rows.shape[1])
            ends = np.minimum(ends, self.problem.num_layers)  # those beyond: infinite
            if left > 1:
                crossing = group.crossing[:, ends, start]
                then = np.where(crossing <= pace, crossing, inf)
                then = then + levels[left - 2][:, ends, group.ends[start]]
            else:
                then = np.where(ends == self.problem.num_layers, 0.0, inf)[None]
            length = int((rows.min(axis=0) + then.min(axis=0)).argmin())
            choice = group.choices[int(rows[:, length].argmin())]
            end = int(ends[length])
            stages.append(Stage(first, end, device, choice))
            first, device = end, int(group.ends[start])
            index = int(then[:, length].argmin())
        return tuple(stages), seconds

    def _best(self, levels: Sequence[np.ndarray]) -> tuple[float, int, int]:
        """The least latency of all layers, with its number of stages and group."""
        best = inf, 0, 0
        for left, level in enumerate(levels, 1):
            if left >= self.problem.min_stages:
                index = int(level[:, 0, 0].argmin())
                best = min(best, (float(level[index, 0, 0]), left, index))
        return best

    def _levels(self, pace: float, once: float) -> Iterator[np.ndarray]:
        """For each number of stages f, as [groups, first layer, first device]."""
        problem, number = self.problem, self.problem.num_layers
        limited = [group.limited(pace, once) for group in self.groups]
        crossing = [np.where(g.crossing <= pace, g.crossing, inf) for g in self.groups]
        done = np.full((number + 1, 1), inf)
        done[number] = 0.0
        costs: list[np.ndarray] = []
        level, before = np.zeros(0), 0
        for left in range(1, self.most + 1):
            held = microbatches_in_flight(problem, 0, left)
            if held != before:
                costs = [
                    np.where(group.allowed >= held, cost, inf).min(axis=0)
                    for group, cost in zip(self.groups, limited, strict=True)
                ]
                before = held
            behind, level = (
                level,
                np.full((len(costs), number + 1, problem.num_devices + 1), inf),
            )
            alive = [] if left == 1 else np.flatnonzero(behind.min(axis=(1, 2)) < inf)
            for index, (group, cost) in enumerate(zip(self.groups, costs, strict=True)):
                if cost.min() == inf:
                    continue
                if left == 1:
                    level[index][:, group.starts] = _then(cost, done)
                    continue
                following = [
                    behind[h][:, group.ends] + crossing[index][h] for h in alive
                ]
                level[index][:, group.starts] = _then(cost, np.min(following, axis=0))
            if level.min() == inf:
                return
            yield level


class _Interleaved:
    def __init__(self, problem: StageProblem, choice: int) -> None:
        self.problem, self.index = problem, choice
        self.choice = problem.choices[choice]
        own, shared = self.choice.num_devices, problem.stages_per_submesh
        self.num_submeshes = number = problem.num_devices // own
        self.num_stages = number * shared
        self.is_possible = (
            number >= 2
            and problem.num_microbatches % number == 0
            and self.num_stages <= problem.num_layers
            and all(problem.may_start(self.choice, i * own) for i in range(number))
        )
        self.seconds = _spans([self.choice.seconds])[0]
        self.allowed = microbatches_held(problem, self.choice)
        self.crossing = [problem.crossing(own, each) for each in (False, True)]
        spans = self.seconds[self.allowed >= 1]
        self.paces = _values([spans, *self.crossing])
        self.least_once = _least_once([(self.seconds, self.choice.once_seconds)])

    def total(self, pace: float, once: float) -> float:
        found = self.least(pace, once)
        return inf if found is None else found[1]

    def is_feasible(self, pace: float, once: float) -> bool:
        return self.least(pace, once) is not None

    def least(self, pace: float, once: float) -> tuple[tuple[Stage, ...], float] | None:
        problem, own = self.problem, self.choice.num_devices
        is_allowed = (self.seconds <= pace) & (self.choice.once_seconds <= once)
        limited = np.where(is_allowed, self.seconds, inf)
        crossing = [np.where(each <= pace, each, inf) for each in self.crossing]
        reached = np.full(problem.num_layers + 1, inf)
        reached[problem.num_layers] = 0.0
        before: list[np.ndarray] = []
        for stage in reversed(range(self.num_stages)):
            upper = (stage + 1) % self.num_submeshes * own
            held = microbatches_in_flight(problem, stage, self.num_stages)
            cost = np.where(self.allowed >= held, limited, inf)
            after = crossing[upper % problem.devices_per_host == 0] + reached
            through = cost + after[None]
            before.append(through.argmin(axis=1))
            reached = through.min(axis=1)
        if reached[0] == inf:
            return None
        stages: list[Stage] = []
        first = 0
        for number, ends in enumerate(reversed(before)):
            end = int(ends[first])
            device = number % self.num_submeshes * own
            stages.append(Stage(first, end, device, self.index))
            first = end
        return tuple(stages), float(reached[0]) / problem.stages_per_submesh


def _values(arrays: Sequence[np.ndarray]) -> np.ndarray:
    every = np.concatenate([each.ravel() for each in arrays])
    return np.unique(every[np.isfinite(every)])


def _least_once(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    return min(
        float(once[np.isfinite(seconds)].min(initial=inf)) for seconds, once in pairs
    )
