"""A step as it was predicted beside the step as it ran, also for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .timeline import Timeline

_MICROSECONDS = 1e6


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
