"""When each task ran on each submesh, measured or simulated; also for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .schedule import Task

_WIDTH = 72
_MICROSECONDS = 1e6


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


@dataclass(frozen=True)
class StepTrace:
    """Two timelines of one step of a pipeline; prints both as bars.

    `measured` is of a step in which every run was waited for: it shows when tasks ran,
    and takes longer than a step that is not recorded.
    """

    name: str
    predicted: Timeline
    measured: Timeline

    def save(self, path: str | Path) -> None:
        """Write it as trace events, which ui.perfetto.dev and chrome://tracing open.

        Each timeline is a process, each submesh a thread, each task a slice.
        """
        parts = (("predicted", self.predicted), ("measured", self.measured))
        events = [
            event
            for number, (label, timeline) in enumerate(parts, start=1)
            for event in _events(number, f"{self.name}, {label}", timeline)
        ]
        trace = {"traceEvents": events, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))

    def __str__(self) -> str:
        return f"predicted: {self.predicted}\nmeasured: {self.measured}"


def _events(process: int, label: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _name("process_name", label, pid=process)
    for submesh in range(timeline.num_submeshes):
        yield _name("thread_name", f"submesh {submesh}", pid=process, tid=submesh + 1)
    for event in timeline.events:
        yield {
            "name": str(event.task),
            "cat": event.task.kind,
            "ph": "X",
            "ts": event.start * _MICROSECONDS,
            "dur": (event.end - event.start) * _MICROSECONDS,
            "pid": process,
            "tid": event.submesh + 1,
            "args": {"stage": event.task.stage, "microbatch": event.task.microbatch},
        }


def _name(kind: str, label: str, **ids: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "args": {"name": label}, **ids}
