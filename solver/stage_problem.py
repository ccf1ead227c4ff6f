"""The problem of stages: layers, submeshes and what spans of layers cost on them.

`stage_dp.py` says what a step takes, and finds the stages for which that is least.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

import numpy as np

ScheduleName = Literal["1f1b", "eager_1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True, eq=False)
class StageChoice:
    """A submesh, and what each span of layers costs there; arrays are [L + 1, L + 1].

    Entry [i, j] is of layers i to j - 1; infinite seconds say that it cannot be.
    `label` is the caller's name for it, `kind` the kind of its devices.
    """

    label: Hashable
    num_devices: int
    seconds: np.ndarray
    once_seconds: np.ndarray
    fixed_bytes: np.ndarray
    microbatch_bytes: np.ndarray
    kind: int = 0


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Layers, devices and choices; see the top of the file.

    `crossing_seconds[h, p]` is for one device to send all that crosses a border before
    layer p, inside a host (h = 0) or between hosts (1); the devices of the smaller side
    share it. `crossing_launch[h]` comes on top. `host_kinds` is the kind of the devices
    of each host.
    """

    num_layers: int
    host_kinds: tuple[int, ...]
    devices_per_host: int
    choices: tuple[StageChoice, ...]
    crossing_seconds: np.ndarray
    crossing_launch: tuple[float, float]
    capacity_bytes: float
    num_microbatches: int
    schedule: ScheduleName = "1f1b"
    stages_per_submesh: int = 1
    min_stages: int = 1
    max_stages: int | None = None

    @property
    def num_devices(self) -> int:
        return len(self.host_kinds) * self.devices_per_host

    @cached_property
    def held(self) -> np.ndarray:
        """How many microbatches a span may have in flight: [choices, L + 1, L + 1].

        Negative where it does not even hold what it always holds.
        """
        fixed = np.array([each.fixed_bytes for each in self.choices])
        each_bytes = np.array([each.microbatch_bytes for each in self.choices])
        room = self.capacity_bytes - self.stages_per_submesh * fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(room / each_bytes * (1 + 1e-12))
        most = np.where(each_bytes > 0, most, inf)
        return np.where(room >= 0, most, -1.0)

    def may_start(self, choice: StageChoice, device: int) -> bool:
        """Whether a submesh may begin at a device: it keeps to one host, or to whole
        ones, all of its kind."""
        inside, number = self.devices_per_host, choice.num_devices
        last = device + number - 1
        if last >= self.num_devices:
            return False
        hosts = range(device // inside, last // inside + 1)
        if any(self.host_kinds[host] != choice.kind for host in hosts):
            return False
        return len(hosts) == 1 or not (device % inside or number % inside)

    def crossing(self, width: int, is_between_hosts: bool) -> np.ndarray:
        """Seconds for what crosses border p, shared by `width` devices: [L + 1]."""
        level = int(is_between_hosts)
        shared = self.crossing_seconds[level] / width
        seconds = shared + self.crossing_launch[level]
        seconds[self.num_layers] = 0.0
        return seconds


@dataclass(frozen=True)
class Stage:
    """Layers `first` to `end` - 1 on devices from `device` on, under a choice."""

    first: int
    end: int
    device: int
    choice: int


def step_seconds(problem: StageProblem, stages: Sequence[Stage]) -> float:
    """What a step takes with these stages; infinite if one holds too much."""
    latency, once = 0.0, 0.0
    shared = problem.stages_per_submesh
    for index, stage in enumerate(stages):
        choice, span = problem.choices[stage.choice], (stage.first, stage.end)
        held = microbatches_in_flight(problem, index, len(stages))
        kept = shared * choice.fixed_bytes[span]
        kept += held * choice.microbatch_bytes[span]
        if kept > problem.capacity_bytes:
            return inf
        latency += float(choice.seconds[span])
        latency += crossing_seconds(problem, stages, index)
        once = max(once, float(choice.once_seconds[span]))
    repeats = shared * problem.num_microbatches - 1
    pace = slowest_seconds(problem, stages)
    return latency / shared + repeats * pace + shared * once


def slowest_seconds(problem: StageProblem, stages: Sequence[Stage]) -> float:
    """The pace: the most that a stage, or what it sends, takes for a microbatch.

    In 1F1B also the mean of what the last stages take, for each number of them: that
    many microbatches are on their way through these, and no more, if there are more.
    """
    pace = through = 0.0
    for index, stage in reversed([*enumerate(stages)]):
        choice, span = problem.choices[stage.choice], (stage.first, stage.end)
        crossing = crossing_seconds(problem, stages, index)
        pace = max(pace, float(choice.seconds[span]), crossing)
        through += float(choice.seconds[span]) + crossing
        number = len(stages) - index
        if problem.schedule == "1f1b" and number < problem.num_microbatches:
            pace = max(pace, through / number)
    return pace


def crossing_seconds(
    problem: StageProblem, stages: Sequence[Stage], index: int
) -> float:
    """Seconds of a microbatch for what crosses the upper border of a stage."""
    stage = stages[index]
    upper = stage.device + problem.choices[stage.choice].num_devices
    if problem.schedule == "interleaved":
        number = len(stages) // problem.stages_per_submesh
        upper %= problem.choices[stage.choice].num_devices * number
    between = upper % problem.devices_per_host == 0
    width = sharing_devices(problem, stages, index)
    return float(problem.crossing(width, between)[stage.end])


def sharing_devices(problem: StageProblem, stages: Sequence[Stage], index: int) -> int:
    """How many devices share what crosses the upper border of a stage."""
    sides = stages[index : index + 2]
    return min(problem.choices[each.choice].num_devices for each in sides)


def most_stages(problem: StageProblem) -> int:
    """How many stages there may be."""
    most = min(problem.num_layers, problem.num_devices)
    return most if problem.max_stages is None else min(most, problem.max_stages)


def microbatches_in_flight(problem: StageProblem, stage: int, num_stages: int) -> int:
    """How many microbatches of a stage's submesh wait for their backward at most."""
    number, shared = problem.num_microbatches, problem.stages_per_submesh
    if problem.schedule == "gpipe":
        return number
    if problem.schedule == "1f1b":
        return min(number, num_stages - stage)
    if problem.schedule == "eager_1f1b":
        return min(number, 2 * (num_stages - stage) - 1)
    submeshes = num_stages // shared
    ahead = 2 * (submeshes - stage % submeshes - 1) + (shared - 1) * submeshes
    return min(shared * number, ahead + 1)
