"""Quick placements: topological fill, list scheduling, and little communication.

Each places whole groups, in an order of its own, on the device that its rule likes best
among those with room. Memory may run out although a placement exists: groups are then
placed again by size, largest first, where most room is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .placement import Placed, PlacementProblem, least_seconds, placed, refuse

Rule = Callable[["_Partial", Sequence[int], int], tuple[float, ...]]


class _Partial:
    """Devices of the operators placed so far, and when they end."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.devices = [-1] * problem.num_operators
        self.ends = [0.0] * problem.num_operators
        self.free_at = [0.0] * problem.num_devices
        self.work = [0.0] * problem.num_devices
        self.room = problem.capacity.astype(float).copy()

    def has_room(self, group: Sequence[int], device: int) -> bool:
        size = self.problem.bytes[list(group)].sum()
        seconds = least_seconds(self.problem, group, device)
        return size <= self.room[device] and np.isfinite(seconds)

    def arrival(self, op: int, device: int) -> float:
        """When the inputs of an operator that are placed would be on a device."""
        problem = self.problem
        return max(
            (
                self.ends[p] + problem.transfer_seconds(size, self.devices[p], device)
                for p, size in problem.inputs[op]
                if self.devices[p] >= 0
            ),
            default=0.0,
        )

    def incoming_seconds(self, group: Sequence[int], device: int) -> float:
        """Seconds of transfers between a group on a device and what is placed."""
        problem, total = self.problem, 0.0
        members = set(group)
        for producer, reader, size in problem.edges:
            if reader in members and self.devices[producer] >= 0:
                source = self.devices[producer]
                total += problem.transfer_seconds(size, source, device)
            elif producer in members and self.devices[reader] >= 0:
                target = self.devices[reader]
                total += problem.transfer_seconds(size, device, target)
        return total

    def end_of(self, group: Sequence[int], device: int) -> float:
        """When a group would be done on a device."""
        end = self.free_at[device]
        for op in group:
            end = max(end, self.arrival(op, device))
            end += float(self.problem.seconds[op, device])
        return end

    def place(self, group: Sequence[int], device: int) -> None:
        problem = self.problem
        self.room[device] -= problem.bytes[list(group)].sum()
        self.work[device] += least_seconds(problem, group, device)
        for op in group:
            start = max(self.free_at[device], self.arrival(op, device))
            self.devices[op] = device
            self.ends[op] = start + float(problem.seconds[op, device])
            self.free_at[device] = self.ends[op]


def topological_fill(problem: PlacementProblem) -> Placed:
    """Device after device in topological order, each its share of the work.

    A device's share is as large as it is fast.
    """
    fastest = problem.seconds.min(axis=1)
    can_run = np.isfinite(problem.seconds)
    taken = np.where(can_run, problem.seconds, 0.0).sum(axis=0)
    speed = (fastest[:, None] * can_run).sum(axis=0) / np.maximum(taken, 1e-30)
    share = fastest.sum() / max(speed.sum(), 1e-30)  # seconds, alike on all devices

    def rule(part: _Partial, group: Sequence[int], device: int) -> tuple[float, ...]:
        is_full = part.work[device] >= share * (1 - 1e-9)
        return (float(is_full), float(device))

    return _greedy(problem, rule, problem.order, "topological")


def list_scheduling(problem: PlacementProblem) -> Placed:
    """Most urgent first, each where it is done earliest (HEFT, Topcuoglu 2002)."""
    order = sorted(problem.order, key=lambda op: -problem.urgency[op])

    def rule(part: _Partial, group: Sequence[int], device: int) -> tuple[float, ...]:
        return (part.end_of(group, device), float(device))

    return _greedy(problem, rule, order, "list")


def small_communication(problem: PlacementProblem) -> Placed:
    """Most urgent first, each where it moves least among devices that are not late.

    A device is late if it would be done a whole operator behind the earliest (after
    Baechi's small communication time, Jeon et al. 2020, without its linear program).
    """
    order = sorted(problem.order, key=lambda op: -problem.urgency[op])

    def rule(part: _Partial, group: Sequence[int], device: int) -> tuple[float, ...]:
        earliest = min(
            part.end_of(group, each)
            for each in range(problem.num_devices)
            if part.has_room(group, each)
        )
        slack = least_seconds(problem, group, device)
        end = part.end_of(group, device)
        return (
            float(end > earliest + slack),
            part.incoming_seconds(group, device),
            end,
            float(device),
        )

    return _greedy(problem, rule, order, "small_communication")


HEURISTICS: dict[str, Callable[[PlacementProblem], Placed]] = {
    "topological": topological_fill,
    "list": list_scheduling,
    "small_communication": small_communication,
}


def _greedy(
    problem: PlacementProblem, rule: Rule, order: Iterable[int], method: str
) -> Placed:
    """Groups in the order of their first operator, each where the rule is least."""
    group_of = {op: group for group in problem.groups for op in group}
    groups = list(dict.fromkeys(group_of[op] for op in order))
    part = _Partial(problem)
    for group in groups:
        fitting = [d for d in range(problem.num_devices) if part.has_room(group, d)]
        if not fitting:
            return placed(problem, _by_size(problem), method)
        part.place(group, min(fitting, key=lambda d: rule(part, group, d)))
    return placed(problem, part.devices, method)


def _by_size(problem: PlacementProblem) -> list[int]:
    """Largest groups first, each where most room is left: for memory that is scarce.

    Raises:
      NoPlacement: a group finds no room; names the largest operator.
    """
    part = _Partial(problem)
    sizes = {group: problem.bytes[list(group)].sum() for group in problem.groups}
    for group in sorted(problem.groups, key=lambda g: (-sizes[g], g)):
        fitting = [d for d in range(problem.num_devices) if part.has_room(group, d)]
        if not fitting:
            raise refuse(problem, group)
        part.place(group, max(fitting, key=lambda d: part.room[d]))
    return part.devices
