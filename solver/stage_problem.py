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

ScheduleName = Literal["1f1b", "eager_1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2"]
ZERO_BUBBLE: tuple[ScheduleName, ...] = ("zb_h1", "zb_h2")


@dataclass(frozen=True, eq=False)
class WeightTasks:
    """What of spans' backward may wait, for zero bubble; arrays are [L + 1, L + 1].

    `weight_seconds` are of work that no lower stage waits for, `forward_seconds` of
    forward; `handed_bytes` is what that work waits with, besides what backward does.
    """

    forward_seconds: np.ndarray
    weight_seconds: np.ndarray
    handed_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class StageChoice:
    """A submesh, and what each span of layers costs there; arrays are [L + 1, L + 1].

    Entry [i, j] is of layers i to j - 1; infinite seconds say that it cannot be.
    `label` is the caller's name for it, `kind` the kind of its devices. Without
    `weight_tasks`, backward stays whole.
    """

    label: Hashable
    num_devices: int
    seconds: np.ndarray
    once_seconds: np.ndarray
    fixed_bytes: np.ndarray
    microbatch_bytes: np.ndarray
    kind: int = 0
    weight_tasks: WeightTasks | None = None


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
        each_bytes = np.array([self.bytes_in_flight(each) for each in self.choices])
        room = self.capacity_bytes - self.stages_per_submesh * fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(room / each_bytes * (1 + 1e-12))
        most = np.where(each_bytes > 0, most, inf)
        return np.where(room >= 0, most, -1.0)

    def bytes_in_flight(self, choice: StageChoice) -> np.ndarray:
        """What each microbatch in flight takes: [L + 1, L + 1]."""
        if self.schedule not in ZERO_BUBBLE or choice.weight_tasks is None:
            return choice.microbatch_bytes
        return choice.microbatch_bytes + choice.weight_tasks.handed_bytes

    @cached_property
    def latencies(self) -> tuple[np.ndarray, ...]:
        """By how much a span as a stage delays the others: [L + 1, L + 1] of choices.

        Zero bubble fills the wait with W tasks, but for that of the first stage,
        which no other waits for (`stage_dp.py`).
        """
        return tuple(map(self._latency, self.choices))

    def _latency(self, choice: StageChoice) -> np.ndarray:
        if self.schedule not in ZERO_BUBBLE or choice.weight_tasks is None:
            return choice.seconds
        whole, forward = choice.seconds, choice.weight_tasks.forward_seconds
        weight = choice.weight_tasks.weight_seconds
        if self.schedule == "zb_h1":
            least = np.maximum(forward, whole - forward - weight)
            filled = np.maximum(whole - 2 * weight, least)
        else:
            filled = np.maximum(whole - 3 * weight, forward)
        filled = np.minimum(filled, whole)
        filled[0] = whole[0]
        return filled

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
    """What a step takes with these stages; infinite if one holds too much, or there are
    too many for the microbatches of a zero-bubble schedule."""
    latency, once = 0.0, 0.0
    shared = problem.stages_per_submesh
    if problem.schedule in ZERO_BUBBLE and len(stages) > most_stages(problem):
        return inf
    for index, stage in enumerate(stages):
        choice, span = problem.choices[stage.choice], (stage.first, stage.end)
        held = microbatches_in_flight(problem, index, len(stages))
        kept = shared * choice.fixed_bytes[span]
        kept += held * problem.bytes_in_flight(choice)[span]
        if kept > problem.capacity_bytes:
            return inf
        latency += float(problem.latencies[stage.choice][span])
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


def warm_up(schedule: ScheduleName) -> int:
    """How many forwards a zero-bubble stage runs ahead, for each stage behind it."""
    return 2 if schedule == "zb_h2" else 1


def most_stages(problem: StageProblem) -> int:
    """How many stages there may be.

    Zero bubble needs as many microbatches as its stages hold: they fill the wait. No
    fewer than there must be.
    """
    most = min(problem.num_layers, problem.num_devices)
    if problem.max_stages is not None:
        most = min(most, problem.max_stages)
    if problem.schedule in ZERO_BUBBLE:
        ahead = (problem.num_microbatches - 1) // warm_up(problem.schedule)
        most = max(min(most, ahead + 1), problem.min_stages)
    return most


def microbatches_in_flight(problem: StageProblem, stage: int, num_stages: int) -> int:
    """How many microbatches of a stage's submesh wait for their backward at most."""
    number, shared = problem.num_microbatches, problem.stages_per_submesh
    if problem.schedule == "gpipe":
        return number
    if problem.schedule == "1f1b":
        return min(number, num_stages - stage)
    if problem.schedule == "eager_1f1b":
        return min(number, 2 * (num_stages - stage) - 1)
    if problem.schedule in ZERO_BUBBLE:
        return min(number, warm_up(problem.schedule) * (num_stages - 1) + 1)
    submeshes = num_stages // shared
    ahead = 2 * (submeshes - stage % submeshes - 1) + (shared - 1) * submeshes
    return min(shared * number, ahead + 1)
