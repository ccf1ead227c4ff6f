"""The least latency of stages under limits of pace and update, over all assignments.

With f[k, g, i, d] the least latency of k stages that hold layers i .. L-1, of which the
first makes a choice of group g (equally many devices n of one kind) from device d on,

  f[k, g, i, d] = min over j of  t[g, i, j] + min over h of  x[g, h, j, d + n]
                                                             + f[k - 1, h, j, d + n]

t is the least of the group's choices that hold k microbatches in flight, x what crosses
the border. Times above the pace, and spans whose update is above its limit, count as
infinite; in 1F1B so does an f above k times the pace, for k < M. Choices meet in t, so
the program is as large as there are sizes of submeshes. In an interleaved schedule all
stages make one choice, and the number of stages is given, and with it their devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .stage_problem import Stage, StageProblem, microbatches_in_flight, most_stages

_ROUNDING = 1e-13
Found = tuple[tuple[Stage, ...], float]  # with their latency


class StageSums(Protocol):
    """The least latency under limits; `least_total` is that without any, or less."""

    least_total: float

    def least(self, pace: float, once: float, ceiling: float) -> Found | None:
        """The stages of the least latency, None if it is not below the ceiling."""
        ...


def sums_of(problem: StageProblem) -> Iterator[StageSums]:
    """One for all choices, or of an interleaved schedule one for each."""
    if problem.schedule != "interleaved":
        yield PlainSums(problem)
        return
    for index, choice in enumerate(problem.choices):
        own, number = choice.num_devices, problem.num_devices // choice.num_devices
        if (
            number >= 2
            and problem.num_microbatches % number == 0
            and number * problem.stages_per_submesh <= problem.num_layers
            and all(problem.may_start(choice, i * own) for i in range(number))
        ):
            yield _Interleaved(problem, index)


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


def _by_length(spans: np.ndarray, longest: int) -> np.ndarray:
    """[.., i, j] as [.., i, j - i - 1]; infinite where j is beyond the last layer."""
    first = np.arange(spans.shape[-1])[:, None]
    ends = first + np.arange(1, longest + 1)
    is_span = ends < spans.shape[-1]
    return np.where(is_span, spans[..., first, np.where(is_span, ends, 0)], inf)


@dataclass(frozen=True, eq=False)
class _Group:
    """Choices of one number of devices of one kind, maybe under limits.

    `seconds` (infinite beyond limits), `once` and `allowed` microbatches in flight are
    [choices, first layer, length - 1], up to the longest span; `crossing` is [next
    group, border, start]. Stages begin at `starts`.
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
        own, allowed = [problem.choices[i] for i in choices], problem.held[[*choices]]
        number, inside = own[0].num_devices, problem.devices_per_host
        devices = range(problem.num_devices)
        starts = np.array([d for d in devices if problem.may_start(own[0], d)], int)
        ends = starts + number
        each_level = np.array(
            [
                [problem.crossing(min(number, size), between) for size in next_sizes]
                for between in (False, True)
            ]
        )
        crossing = np.moveaxis(each_level[(ends % inside == 0).astype(int)], 0, -1)
        seconds = spans_only([each.seconds for each in own])
        seconds = np.where(allowed >= 1, seconds, inf)
        _, first, end = np.nonzero(np.isfinite(seconds))
        longest = int((end - first).max(initial=1))
        once = np.array([each.once_seconds for each in own])
        return cls(
            tuple(choices),
            _by_length(seconds, longest),
            _by_length(once, longest),
            _by_length(allowed, longest),
            *(starts, ends, crossing),
        )

    def limited(self, pace: float, once: float) -> _Group:
        """What is left under the limits."""
        is_allowed = (self.seconds <= pace) & (self.once <= once)
        longest = 1 + int(np.flatnonzero(is_allowed.any(axis=(0, 1))).max(initial=0))
        seconds = np.where(is_allowed, self.seconds, inf)[..., :longest]
        crossing = np.where(self.crossing <= pace, self.crossing, inf)
        spans = seconds, self.once, self.allowed[..., :longest]
        return _Group(self.choices, *spans, self.starts, self.ends, crossing)

    def holding(self, held: int) -> np.ndarray:
        """Seconds of spans that hold so many microbatches."""
        return np.where(self.allowed >= held, self.seconds, inf)


class PlainSums:
    """For all but interleaved schedules: a submesh for every stage."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        alike: dict[tuple[int, int], list[int]] = {}
        for index, choice in enumerate(problem.choices):
            alike.setdefault((choice.num_devices, choice.kind), []).append(index)
        sizes = [number for number, _ in alike]
        self.groups = [_Group.of(problem, own, sizes) for own in alike.values()]
        spans = spans_only([each.seconds for each in problem.choices])
        least = np.min(spans, axis=0, where=problem.held >= 1, initial=inf)
        self.before = least_paths(least)
        self.least_total = float(self.before[-1])

    def least(self, pace: float, once: float, ceiling: float) -> Found | None:
        """See `StageSums`.

        Levels, each of one more stage, end where more stages and the layers before
        them cannot be better.
        """
        groups = [group.limited(pace, once) for group in self.groups]
        latency, most, index = ceiling, 0, 0
        levels: list[np.ndarray] = []
        for level in self._levels(groups, pace):
            levels.append(level)
            first = level[:, 0, 0]
            if len(levels) >= self.problem.min_stages and first.min() < latency:
                latency, most, index = first.min(), len(levels), int(first.argmin())
            if (level.min(axis=(0, 2)) + self.before).min() >= latency:
                break
        if not most:
            return None
        stages: list[Stage] = []
        first = device = 0
        for left in range(most, 0, -1):
            group = groups[index]
            held = microbatches_in_flight(self.problem, 0, left)
            rows = group.holding(held)[:, first]
            ends = np.arange(first + 1, first + 1 + rows.shape[1])
            ends = np.minimum(ends, self.problem.num_layers)  # those beyond: infinite
            start = int(np.flatnonzero(group.starts == device)[0])
            then = np.where(ends == self.problem.num_layers, 0.0, inf)[None]
            if left > 1:
                then = group.crossing[:, ends, start]
                then = then + levels[left - 2][:, ends, group.ends[start]]
            length = int((rows.min(axis=0) + then.min(axis=0)).argmin())
            choice = group.choices[int(rows[:, length].argmin())]
            stages.append(Stage(first, int(ends[length]), device, choice))
            first, device = int(ends[length]), int(group.ends[start])
            index = int(then[:, length].argmin())
        return tuple(stages), float(latency)

    def _levels(self, groups: Sequence[_Group], pace: float) -> Iterator[np.ndarray]:
        """For each number of stages f, as [groups, first layer, first device]."""
        problem, number = self.problem, self.problem.num_layers
        shape = len(groups), number + 1, problem.num_devices + 1
        behind = np.full(shape, inf)
        for left in range(1, most_stages(problem) + 1):
            held = microbatches_in_flight(problem, 0, left)
            level = np.full(shape, inf)
            alive = np.flatnonzero(behind.min(axis=(1, 2)) < inf)
            for index, group in enumerate(groups):
                spans = group.holding(held).min(axis=0)
                if spans.min() == inf:
                    continue
                after = np.full((number + 1 + spans.shape[1], len(group.starts)), inf)
                if left == 1:
                    after[number] = 0.0
                elif alive.size:
                    later = np.take(behind[alive], group.ends, axis=2)
                    after[: number + 1] = (later + group.crossing[alive]).min(axis=0)
                then = sliding_window_view(after[1:], spans.shape[1], axis=0)
                level[index][:, group.starts] = (spans[:, None] + then).min(axis=2)
            if problem.schedule == "1f1b" and left < problem.num_microbatches:
                level[level > left * pace * (1 + _ROUNDING)] = inf
            if level.min() == inf:
                return
            yield level
            behind = level


class _Interleaved:
    """Stages that share submeshes, all of one choice: stage s is on s mod P."""

    def __init__(self, problem: StageProblem, choice: int) -> None:
        self.problem, self.index = problem, choice
        self.choice = problem.choices[choice]
        own, shared = self.choice.num_devices, problem.stages_per_submesh
        self.num_submeshes = problem.num_devices // own
        self.allowed = problem.held[choice]
        seconds = spans_only([self.choice.seconds])[0]
        self.seconds = np.where(self.allowed >= 1, seconds, inf)
        self.crossing = [problem.crossing(own, each) for each in (False, True)]
        self.least_total = float(least_paths(self.seconds)[-1]) / shared

    def least(self, pace: float, once: float, ceiling: float) -> Found | None:
        """See `StageSums`."""
        problem, own = self.problem, self.choice.num_devices
        is_allowed = (self.seconds <= pace) & (self.choice.once_seconds <= once)
        limited = np.where(is_allowed, self.seconds, inf)
        crossing = [np.where(each <= pace, each, inf) for each in self.crossing]
        reached = np.full(problem.num_layers + 1, inf)
        reached[problem.num_layers] = 0.0
        before: list[np.ndarray] = []
        number = self.num_submeshes * problem.stages_per_submesh
        for stage in reversed(range(number)):
            upper = (stage + 1) % self.num_submeshes * own
            held = microbatches_in_flight(problem, stage, number)
            after = crossing[upper % problem.devices_per_host == 0] + reached
            through = np.where(self.allowed >= held, limited, inf) + after[None]
            before.append(through.argmin(axis=1))
            reached = through.min(axis=1)
        latency = float(reached[0]) / problem.stages_per_submesh
        if latency >= ceiling:
            return None
        stages: list[Stage] = []
        first = 0
        for stage, ends in enumerate(reversed(before)):
            end = int(ends[first])
            device = stage % self.num_submeshes * own
            stages.append(Stage(first, end, device, self.index))
            first = end
        return tuple(stages), latency
