"""When each task ran on each submesh, measured or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Task

_WIDTH = 72


@dataclass(frozen=True)
class Event:
    """One task of one submesh, in seconds since the start of the step."""

    submesh: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of a step; prints as a bar a submesh, each letter a kind of task."""

    num_submeshes: int
    events: tuple[Event, ...]

    @property
    def makespan_seconds(self) -> float:
        """From the start of the step to the end of its last task."""
        return max((event.end for event in self.events), default=0.0)

    def busy_seconds(self, submesh: int) -> float:
        """How long a submesh ran tasks."""
        return sum(e.end - e.start for e in self.events if e.submesh == submesh)

    @property
    def bubble_fraction(self) -> float:
        """The part of all submeshes' time in which they ran no task."""
        total = self.makespan_seconds * self.num_submeshes
        busy = sum(self.busy_seconds(i) for i in range(self.num_submeshes))
        return 1 - busy / total if total else 0.0

    def tasks(self, submesh: int) -> tuple[Task, ...]:
        """What a submesh ran, in order."""
        mine = [event for event in self.events if event.submesh == submesh]
        ordered = sorted(mine, key=lambda event: event.start)
        return tuple(dict.fromkeys(event.task for event in ordered))

    def __str__(self) -> str:
        makespan = self.makespan_seconds
        head = f"{makespan:.6g} s, {self.bubble_fraction:.1%} of it idle"
        bars = [["."] * _WIDTH for _ in range(self.num_submeshes)]
        for event in self.events:
            start = int(event.start / makespan * _WIDTH) if makespan else 0
            end = int(event.end / makespan * _WIDTH) if makespan else 0
            letter = str(event.task).lstrip("0123456789")[0]
            for column in range(start, end):
                bars[event.submesh][column] = letter
        lines = [f"submesh {i}: {''.join(bar)}" for i, bar in enumerate(bars)]
        return "\n".join([head, *lines])
