"""The least latency of stages under limits of pace and update, over all assignments.

With f[k, g, i, d] the least latency of k stages that hold layers i .. L-1, of which the
first makes a choice of group g (equally many devices n of one kind) from device d on,

  f[k, g, i, d] = min over j of  t[g, i, j] + min over h of  x[g, h, j, d + n]
                                                             + f[k - 1, h, j, d + n]

t is the least of the group's choices that hold k microbatches in flight, x what crosses
the border. Times above the pace, and spans whose update is above its limit, count as
infinite; in 1F1B so does an f above k times the pace, for k < M. Choices meet in t, so
the program is as large as there are sizes of submeshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import numpy as np

from .stage_problem import (
    ZERO_BUBBLE,
    Stage,
    StageProblem,
    microbatches_in_flight,
    most_stages,
)
from .stage_spans import (
    by_length,
    finite_values,
    least_once_of,
    least_paths,
    spans_only,
)

_ROUNDING = 1e-12


class StageSums(Protocol):
    """What the enumeration of limits asks.

    `paces` are all values that the pace can have, ascending, and others between them if
    `has_others`; `least_once` is the least update of any span, `least_total` a bound on
    the latency, `least_seconds` on a step.
    """

    has_others: bool
    least_once: float
    least_total: float
    least_seconds: float

    @property
    def paces(self) -> np.ndarray: ...

    def may_be_feasible(self, pace: float, once: float) -> bool:
        """False only if there is none under the limits; true from some pace on."""
        ...

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


@dataclass(frozen=True, eq=False)
class _Group:
    """Choices of one number of devices of one kind.

    Arrays are [choices, first layer, length - 1], up to the longest span that holds a
    microbatch. `crossing` is [next group, border, start], of values that are sorted in
    `crossing_values`; stages begin at `starts`.
    """

    choices: tuple[int, ...]
    num_devices: int
    seconds: np.ndarray
    paces: np.ndarray
    once: np.ndarray
    allowed: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    crossing: np.ndarray
    crossing_values: np.ndarray

    @classmethod
    def of(
        cls, problem: StageProblem, choices: Sequence[int], next_sizes: Sequence[int]
    ) -> _Group:
        own, allowed = [problem.choices[i] for i in choices], problem.held[[*choices]]
        number, inside = own[0].num_devices, problem.devices_per_host
        starts = np.array(
            [d for d in range(problem.num_devices) if problem.may_start(own[0], d)],
            int,
        )
        ends = starts + number
        level = (ends % inside == 0).astype(int)
        each_level = np.array(
            [
                [problem.crossing(min(number, size), between) for size in next_sizes]
                for between in (False, True)
            ]
        )
        crossing = np.moveaxis(each_level[level], 0, -1)
        seconds = spans_only([problem.latencies[i] for i in choices])
        _, first, end = np.nonzero(np.isfinite(seconds) & (allowed >= 1))
        longest = int((end - first).max(initial=1))
        once = np.array([each.once_seconds for each in own])
        return cls(
            tuple(choices),
            number,
            by_length(seconds, longest),
            by_length(spans_only([each.seconds for each in own]), longest),
            by_length(once, longest),
            by_length(allowed, longest),
            starts,
            ends,
            crossing,
            finite_values([each_level[np.unique(level)]]),
        )

    def is_allowed(self, pace: float, once: float) -> np.ndarray:
        """Which spans hold a microbatch and keep to the limits."""
        return (self.paces <= pace) & (self.once <= once) & (self.allowed >= 1)

    def limited(self, pace: float, once: float) -> _Limited:
        """What is left under the limits."""
        is_allowed = self.is_allowed(pace, once)
        longest = 1 + int(np.flatnonzero(is_allowed.any(axis=(0, 1))).max(initial=0))
        is_allowed = is_allowed[..., :longest]
        allowed = self.allowed[..., :longest]
        seconds = np.where(is_allowed, self.seconds[..., :longest], inf)
        held = np.min(allowed, where=is_allowed, initial=inf)
        crossing = np.where(self.crossing <= pace, self.crossing, inf)
        return _Limited(self, seconds, allowed, crossing, float(held))


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


class PlainSums:
    """For all but interleaved schedules: a submesh for every stage."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        alike: dict[tuple[int, int], list[int]] = {}
        for index, choice in enumerate(problem.choices):
            alike.setdefault((choice.num_devices, choice.kind), []).append(index)
        sizes = [number for number, _ in alike]
        every = [_Group.of(problem, own, sizes) for own in alike.values()]
        self.groups = every
        self.most = most_stages(problem)
        spans = [g.paces[g.allowed >= 1] for g in every]
        crossings = [g.crossing_values for g in every]
        self.paces = finite_values([*spans, *crossings])
        self.has_others = problem.schedule == "1f1b"
        if self.has_others:
            longest = finite_values([g.seconds for g in every])[-1:]
            most = longest + finite_values(crossings)[-1:]
            self.paces = finite_values([self.paces, most])
        self.least_once = least_once_of([(g.seconds, g.once) for g in every])
        spans = spans_only(problem.latencies)
        least = np.min(spans, axis=0, where=problem.held >= 1, initial=inf)
        self.before = least_paths(least)
        self.least_total = self.least_seconds = float(self.before[-1])

    def of(self, num_stages: int) -> PlainSums:
        """The same for so many stages."""
        found = copy(self)
        found.problem = replace(
            self.problem, min_stages=num_stages, max_stages=num_stages
        )
        found.most = num_stages
        return found

    def _held(self, left: int) -> int:
        """Microbatches in flight of the first of the last `left` stages, at the least.

        Of zero bubble, all stages have those of the first, once it is known how many
        there are.
        """
        problem = self.problem
        if problem.schedule in ZERO_BUBBLE and problem.min_stages == self.most:
            left = self.most
        return microbatches_in_flight(problem, 0, left)

    def may_be_feasible(self, pace: float, once: float) -> bool:
        """Whether spans in a row have as many devices as they need, wherever these lie
        and whatever waits for them."""
        number = self.problem.num_layers
        needed = np.full((number + 1, number + 1), inf)
        for group in sorted(self.groups, key=lambda each: -each.num_devices):
            first, length = np.nonzero(group.is_allowed(pace, once).any(axis=0))
            needed[first, first + length + 1] = group.num_devices
        return least_paths(needed)[-1] <= self.problem.num_devices

    def is_feasible(self, pace: float, once: float) -> bool:
        least = self.problem.min_stages
        limited = [group.limited(pace, once) for group in self.groups]
        return any(
            left >= least and level[:, 0, 0].min() < inf
            for left, level in enumerate(self._levels(limited, pace), 1)
        )

    def least(
        self, pace: float, once: float, ceiling: float = inf
    ) -> tuple[tuple[Stage, ...], float] | None:
        limited = [group.limited(pace, once) for group in self.groups]
        levels, (seconds, most, index) = self._best(limited, pace, ceiling)
        if not most:
            return None
        stages: list[Stage] = []
        first = device = 0
        for left in range(most, 0, -1):
            group = self.groups[index]
            start = int(np.flatnonzero(group.starts == device)[0])
            held = self._held(left)
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
        self, limited: Sequence[_Limited], pace: float, ceiling: float
    ) -> tuple[list[np.ndarray], tuple[float, int, int]]:
        """The levels, and the least latency of all layers with its stages and group.

        No stages if it is not below the ceiling. Levels end where more stages, and the
        layers before them, cannot be better.
        """
        best, levels = (ceiling, 0, 0), list[np.ndarray]()
        for left, level in enumerate(self._levels(limited, pace), 1):
            levels.append(level)
            if left >= self.problem.min_stages:
                index = int(level[:, 0, 0].argmin())
                best = min(best, (float(level[index, 0, 0]), left, index))
            if (level.min(axis=(0, 2)) + self.before).min() >= best[0]:
                break
        return levels, best

    def _levels(self, limited: Sequence[_Limited], pace: float) -> Iterator[np.ndarray]:
        """For each number of stages f, as [groups, first layer, first device]."""
        problem, number = self.problem, self.problem.num_layers
        possible = [(i, each) for i, each in enumerate(limited) if each.is_possible]
        shape = len(limited), number + 1, problem.num_devices + 1
        level = np.full(shape, inf)
        for left in range(1, self.most + 1):
            held = self._held(left)
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
            if self.has_others and left < problem.num_microbatches:
                level[level > left * pace * (1 + _ROUNDING)] = inf
            if level.min() == inf:
                return
            yield level
