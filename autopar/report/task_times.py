"""When each task of a pipeline runs, from the plan's rows, seconds and transfers.

A submesh runs its row in order. A task waits for what other stages send it: forward
tasks for stages below, backward tasks for stages above, apply tasks for what crosses
once a step. Between two stages one value is under way at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..clusters.cluster import Cluster
from ..lowering.programs import TaskKind
from ..plans.staged_plan import PlannedTransfer, StagedPlan

_KINDS: dict[str, TaskKind] = {
    "F": "forward",
    "B": "backward",
    "W": "weight",
    "A": "apply",
}
# What a stage runs last of a microbatch, and so makes sums over them complete.
_LAST: tuple[TaskKind, ...] = ("weight", "backward", "forward", "apply")
_TASK = re.compile(r"(\d+)([FBWA])(\d*)")


@dataclass(frozen=True)
class TaskTime:
    """One task of a submesh, in seconds since the start of the step.

    `microbatch` is None for apply.
    """

    name: str
    submesh: int
    stage: int
    kind: TaskKind
    microbatch: int | None
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class TaskTimes:
    """The tasks of a step; `num_waiting` could not run, as what they need never comes.

    `has_transfers` is false where the links are not known and values arrive at once.
    """

    tasks: tuple[TaskTime, ...]
    num_waiting: int
    has_transfers: bool

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return max((task.end for task in self.tasks), default=0.0)

    def row(self, submesh: int) -> tuple[TaskTime, ...]:
        """What a submesh runs, in order."""
        return tuple(task for task in self.tasks if task.submesh == submesh)

    def most_in_flight(self, submesh: int) -> int:
        """The most microbatches between their first and last task on a submesh."""
        row = [task for task in self.row(submesh) if task.microbatch is not None]
        last = {(task.stage, task.microbatch): i for i, task in enumerate(row)}
        held = most = 0
        for position, task in enumerate(row):
            held += task.kind == "forward"
            most = max(most, held)
            held -= last[task.stage, task.microbatch] == position
        return most


def task_times(plan: StagedPlan, cluster: Cluster | None) -> TaskTimes:
    """The times of all tasks; `cluster` prices transfers."""
    rows = [[_task(text, i) for text in row.split()] for i, row in enumerate(plan.rows)]
    clock = _Clock(plan, cluster)
    done: list[TaskTime] = []
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for submesh, row in enumerate(rows):
            while position[submesh] < len(row):
                found = clock.run(row[position[submesh]])
                if found is None:
                    break
                done.append(found)
                position[submesh] += 1
                moved = True
    waiting = sum(len(row) for row in rows) - len(done)
    return TaskTimes(tuple(done), waiting, cluster is not None)


def transfer_seconds(
    plan: StagedPlan, each: PlannedTransfer, cluster: Cluster
) -> float:
    """Seconds of one transfer; every device of the smaller side takes part."""
    here, there = (stage % len(plan.meshes) for stage in (each.source, each.target))
    if here == there:
        return 0.0
    sizes = [mesh.size for mesh in plan.meshes]
    hosts = {sum(sizes[:i]) // cluster.devices_per_host for i in (here, there)}
    link = cluster.host_link if len(hosts) == 1 else cluster.network_link
    width = min(sizes[here], sizes[there])
    return link.alpha_seconds + each.bytes / width / (link.bandwidth * link.efficiency)


class _Clock:
    """How far each submesh and link has come."""

    def __init__(self, plan: StagedPlan, cluster: Cluster | None) -> None:
        self.plan, self.cluster = plan, cluster
        self.seconds = {
            (stage, kind): plan.task_seconds(stage, kind)
            for stage in range(plan.num_stages)
            for kind in _KINDS.values()
        }
        kinds = {each.kind for each in plan.programs}
        self.last_kind: TaskKind = next(k for k in _LAST if k in kinds)
        self.free_at = [0.0] * len(plan.rows)
        self.link_free_at: dict[tuple[int, int], float] = defaultdict(float)
        self.arrived: dict[tuple[int, TaskKind, int | None, int], float] = {}
        self.sent = self._sent_by_task()
        self.needed: dict[tuple[int, TaskKind], set[int]] = defaultdict(set)
        for (source, _), transfers in self.sent.items():
            for each in transfers:
                self.needed[each.target, self._reader(each)].add(source)

    def _sent_by_task(self) -> dict[tuple[int, TaskKind], list[PlannedTransfer]]:
        """Transfers by the stage and kind of the task that makes the value."""
        kept = {
            (argument.path, each.stage)
            for each in self.plan.programs
            for argument in each.sharding.inputs
            if argument.role == "state" and each.kind == "apply"
        }
        found: dict[tuple[int, TaskKind], list[PlannedTransfer]] = defaultdict(list)
        for each in self.plan.transfers:
            if (each.slot, each.source) not in kept:  # state is there from the start
                found[each.source, self._writer(each)].append(each)
        return found

    def _writer(self, each: PlannedTransfer) -> TaskKind:
        if self._is_once(each):
            return self.last_kind
        return "forward" if each.source < each.target else "backward"

    def _is_once(self, each: PlannedTransfer) -> bool:
        is_sum = each.slot.startswith("sum of ")
        return is_sum or each.count < self.plan.num_microbatches

    def _reader(self, each: PlannedTransfer) -> TaskKind:
        if self._is_once(each):
            return "apply"
        return "forward" if each.source < each.target else "backward"

    def run(self, task: TaskTime) -> TaskTime | None:
        """The task with its times; None if something it needs is not there yet."""
        start = self.free_at[task.submesh]
        for source in self.needed.get((task.stage, task.kind), ()):
            key = task.stage, task.kind, task.microbatch, source
            if key not in self.arrived:
                return None
            start = max(start, self.arrived[key])
        end = start + self.seconds[task.stage, task.kind]
        self.free_at[task.submesh] = end
        self._send(task, end)
        return TaskTime(
            *(task.name, task.submesh, task.stage, task.kind, task.microbatch),
            *(start, end),
        )

    def _send(self, task: TaskTime, now: float) -> None:
        for each in self.sent.get((task.stage, task.kind), ()):
            is_once = self._is_once(each)
            if is_once and task.microbatch != self.plan.num_microbatches - 1:
                continue
            pair = each.source, each.target
            arrival = max(now, self.link_free_at[pair])
            if self.cluster is not None:
                arrival += transfer_seconds(self.plan, each, self.cluster)
            self.link_free_at[pair] = arrival
            microbatch = None if is_once else task.microbatch
            key = each.target, self._reader(each), microbatch, each.source
            self.arrived[key] = max(arrival, self.arrived.get(key, 0.0))


def _task(text: str, submesh: int) -> TaskTime:
    found = _TASK.fullmatch(text)
    assert found is not None, f"{text!r} is no task"
    stage, letter, microbatch = found.groups()
    number = int(microbatch) if microbatch else None
    return TaskTime(text, submesh, int(stage), _KINDS[letter], number)


def kinds_used(times: TaskTimes) -> Iterator[TaskKind]:
    """The kinds of task that the step has, in their usual order."""
    used = {task.kind for task in times.tasks}
    return (kind for kind in _KINDS.values() if kind in used)
