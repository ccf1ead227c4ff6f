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
    update of any span, `least_total` a bound on the latency.
    """

    paces: np.ndarray
    least_once: float
    least_total: float

    def is_feasible(self, pace: float, once: float) -> bool:
        """Whether there is any under the limits."""
        ...

    def least(
        self, pace: float, once: float, ceiling: float = inf
    ) -> tuple[tuple[Stage, ...], float] | None:
        """The stages of the least latency under the limits, and that latency.

        None if it is not below the ceiling.
        """
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
    paces: np.ndarray
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
            _by_length(_spans([each.paces for each in own]), longest),
            _by_length(once, longest),
            _by_length(allowed, longest),
            starts,
            ends,
            crossing,
        )

    def limited(self, pace: float, once: float) -> _Limited:
        """What is left under the limits."""
        is_allowed = (self.paces <= pace) & (self.once <= once)
        is_allowed &= self.allowed >= 1
        longest = 1 + int(np.flatnonzero(is_allowed.any(axis=(0, 1))).max(initial=0))
        is_allowed = is_allowed[..., :longest]
        allowed = self.allowed[..., :longest]
        seconds = np.where(is_allowed, self.seconds[..., :longest], inf)
        held = np.min(allowed, where=is_allowed, initial=inf)
        crossing = np.where(self.crossing <= pace, self.crossing, inf)
        return _Limited(self, seconds, allowed, crossing, float(held))


def _held_spans(problem: StageProblem, choice: StageChoice) -> np.ndarray:
    """Times of spans that hold a microbatch; all else is infinite: [L + 1, L + 1]."""
    fits = microbatches_held(problem, choice) >= 1
    return np.where(fits, _spans([choice.seconds])[0], inf)


def least_paths(costs: np.ndarray) -> np.ndarray:
    """The least sums of [L + 1, L + 1] over spans that follow each other from 0 on, to
    each border: [L + 1]."""
    reached = np.full(len(costs), inf)
    reached[0] = 0.0
    for end in range(1, len(costs)):
        reached[end] = (reached[:end] + costs[:end, end]).min()
    return reached


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


class _Limited:
    """A group under limits of pace and update; all that is beyond them is infinite.

    `seconds` and `allowed` are [choices, first layer, length - 1], up to the longest
    span within the limits; `crossing` is [next group, border, start].
    """

    def __init__(
        self,
        group: _Group,
        seconds: np.ndarray,
        allowed: np.ndarray,
        crossing: np.ndarray,
        least_allowed: float,
    ) -> None:
        self.group, self.seconds, self.allowed = group, seconds, allowed
        self.crossing, self.least_allowed = crossing, least_allowed
        self.least = seconds.min(axis=0)
        self.is_possible = bool(np.isfinite(self.least).any())
        size, longest = self.least.shape
        # What comes behind each border, and the same seen from each span's end.
        self.after = np.full((size + longest, len(group.starts)), inf)
        row, column = self.after.strides
        shape, strides = (size, longest, len(group.starts)), (row, row, column)
        self._behind = np.ndarray(shape, float, self.after, row, strides)

    def holding(self, held: int) -> np.ndarray:
        """Times of spans that hold so many microbatches: [first layer, length - 1]."""
        if held <= self.least_allowed:
            return self.least
        return np.where(self.allowed >= held, self.seconds, inf).min(axis=0)

    def then(self, costs: np.ndarray) -> np.ndarray:
        """The least sum of a span and of `after`: [first layer, starts]."""
        return (costs[:, :, None] + self._behind).min(axis=1)


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
        spans = [g.paces[g.allowed >= 1] for g in every]
        self.paces = _values([*spans, *(g.crossing for g in every)])
        self.least_once = _least_once([(g.seconds, g.once) for g in every])
        spans = [_held_spans(problem, each) for each in problem.choices]
        self.before = least_paths(np.min(spans, axis=0))
        self.least_total = float(self.before[-1])

    def is_feasible(self, pace: float, once: float) -> bool:
        least = self.problem.min_stages
        limited = [group.limited(pace, once) for group in self.groups]
        return any(
            left >= least and level[:, 0, 0].min() < inf
            for left, level in enumerate(self._levels(limited), 1)
        )

    def least(
        self, pace: float, once: float, ceiling: float = inf
    ) -> tuple[tuple[Stage, ...], float] | None:
        limited = [group.limited(pace, once) for group in self.groups]
        levels, (seconds, most, index) = self._best(limited, ceiling)
        if not most:
            return None
        stages: list[Stage] = []
        first = device = 0
        for left in range(most, 0, -1):
            group = self.groups[index]
            start = int(np.flatnonzero(group.starts == device)[0])
            held = microbatches_in_flight(self.problem, 0, left)
            rows = limited[index].seconds[:, first]
            rows = np.where(limited[index].allowed[:, first] >= held, rows, inf)
            ends = np.arange(first + 1, first + 1 + rows.shape[1])
            ends = np.minimum(ends, self.problem.num_layers)  # those beyond: infinite
            if left > 1:
                then = limited[index].crossing[:, ends, start]
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

    def _best(
        self, limited: Sequence[_Limited], ceiling: float
    ) -> tuple[list[np.ndarray], tuple[float, int, int]]:
        """The levels, and the least latency of all layers with its stages and group.

        No stages if it is not below the ceiling. Levels end where more stages, and the
        layers before them, cannot be better.
        """
        best, levels = (ceiling, 0, 0), list[np.ndarray]()
        for left, level in enumerate(self._levels(limited), 1):
            levels.append(level)
            if left >= self.problem.min_stages:
                index = int(level[:, 0, 0].argmin())
                best = min(best, (float(level[index, 0, 0]), left, index))
            if (level.min(axis=(0, 2)) + self.before).min() >= best[0]:
                break
        return levels, best

    def _levels(self, limited: Sequence[_Limited]) -> Iterator[np.ndarray]:
        """For each number of stages f, as [groups, first layer, first device]."""
        problem, number = self.problem, self.problem.num_layers
        possible = [(i, each) for i, each in enumerate(limited) if each.is_possible]
        shape = len(limited), number + 1, problem.num_devices + 1
        level = np.full(shape, inf)
        for left in range(1, self.most + 1):
            held = microbatches_in_flight(problem, 0, left)
            behind, level = level, np.full(shape, inf)
            alive = np.flatnonzero(behind.min(axis=(1, 2)) < inf)
            ahead = behind[alive]
            for index, each in possible:
                if left == 1:
                    each.after[number] = 0.0
                else:
                    after = np.take(ahead, each.group.ends, axis=2)
                    after += each.crossing[alive]
                    after.min(axis=0, out=each.after[: number + 1])
                level[index][:, each.group.starts] = each.then(each.holding(held))
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
        self.pace_seconds = _spans([self.choice.paces])[0]
        self.allowed = microbatches_held(problem, self.choice)
        self.crossing = [problem.crossing(own, each) for each in (False, True)]
        spans = self.pace_seconds[self.allowed >= 1]
        self.paces = _values([spans, *self.crossing])
        self.least_once = _least_once([(self.seconds, self.choice.once_seconds)])
        least = least_paths(_held_spans(problem, self.choice))
        self.least_total = float(least[-1]) / problem.stages_per_submesh

    def is_feasible(self, pace: float, once: float) -> bool:
        return self.least(pace, once) is not None

    def least(
        self, pace: float, once: float, ceiling: float = inf
    ) -> tuple[tuple[Stage, ...], float] | None:
        problem, own = self.problem, self.choice.num_devices
        is_allowed = (self.pace_seconds <= pace) & (self.choice.once_seconds <= once)
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
        if reached[0] / problem.stages_per_submesh >= ceiling:
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
