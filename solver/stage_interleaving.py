"""The least latency of stages that share submeshes (interleaved), all of one choice.

Stage s of an interleaved schedule runs on submesh s mod P, so all submeshes are of one
size and one choice, which are tried in turn; for each, one dynamic program over layers
and stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from .stage_problem import Stage, StageProblem, microbatches_in_flight
from .stage_spans import finite_values, least_once_of, least_paths, spans_only
from .stage_sums import StageSums


def interleaved_sums(problem: StageProblem) -> Sequence[StageSums]:
    """For stages that all make one choice and share submeshes: of each choice
    that can."""
    shared = problem.stages_per_submesh
    found: list[int] = []
    for index, choice in enumerate(problem.choices):
        own, number = choice.num_devices, problem.num_devices // choice.num_devices
        if (
            number >= 2
            and problem.num_microbatches % number == 0
            and number * shared <= problem.num_layers
            and all(problem.may_start(choice, i * own) for i in range(number))
        ):
            found.append(index)
    if not found:
        return []
    held = problem.held[found] >= 1
    seconds = spans_only([problem.choices[index].seconds for index in found])
    totals = least_paths(np.where(held, seconds, inf))[:, -1].tolist()
    every = zip(found, totals, strict=True)
    return [_Interleaved(problem, *each) for each in every]


class _Interleaved:
    """`total` is the least that a microbatch takes in all."""

    has_others = False

    def __init__(self, problem: StageProblem, choice: int, total: float) -> None:
        self.problem, self.index = problem, choice
        self.choice = problem.choices[choice]
        own, shared = self.choice.num_devices, problem.stages_per_submesh
        self.num_submeshes = number = problem.num_devices // own
        self.num_stages = number * shared
        self.seconds = spans_only([self.choice.seconds])[0]
        self.allowed = problem.held[choice]
        self.crossing = [problem.crossing(own, each) for each in (False, True)]
        self.least_once = least_once_of([(self.seconds, self.choice.once_seconds)])
        self.least_total = total / shared
        least_pace = total / self.num_stages
        repeats = shared * problem.num_microbatches - 1
        self.least_seconds = (
            self.least_total + repeats * least_pace + shared * self.least_once
        )

    @property
    def paces(self) -> np.ndarray:
        spans = self.seconds[self.allowed >= 1]
        return finite_values([spans, *self.crossing])

    def may_be_feasible(self, pace: float, once: float) -> bool:
        """True: whether there is any takes as long to find out."""
        return True

    def is_feasible(self, pace: float, once: float) -> bool:
        return self.least(pace, once) is not None

    def least(
        self, pace: float, once: float, ceiling: float = inf
    ) -> tuple[tuple[Stage, ...], float] | None:
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
