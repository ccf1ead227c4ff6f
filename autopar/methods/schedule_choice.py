"""Which schedule a pipeline runs: one by name, or a user's own as rows of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

SCHEDULES = ("1f1b", "eager_1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2")
_WITH_WEIGHT_TASKS = ("zb_h1", "zb_h2")

# Takes the numbers of stages and microbatches; returns the tasks of each submesh in
# order, as texts such as "0F0 0F1 0B0 0B1 0A" or as what prints as these.
ScheduleFunction = Callable[[int, int], Iterable[str | Iterable[object]]]


@dataclass(frozen=True)
class ScheduleRows:
    """A schedule as the rows of a plan: a `ScheduleFunction` for its own sizes."""

    name: str
    rows: tuple[str, ...]

    def __call__(self, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
        return self.rows


def check_schedule(schedule: object) -> None:
    """Refuses what is neither a name nor a function.

    Raises:
      ValueError: an unknown name; the nearest one is suggested.
    """
    if callable(schedule) or schedule in SCHEDULES:
        return
    near = get_close_matches(str(schedule).lower(), SCHEDULES, 1, 0.3)
    raise ValueError(
        f"`schedule` must be one of {', '.join(SCHEDULES)}, or a function of the "
        f"numbers of stages and microbatches, but got {schedule!r}; use "
        f"{(near or SCHEDULES)[0]!r}."
    )


def schedule_name(schedule: str | ScheduleFunction) -> str:
    """What plans call it."""
    if isinstance(schedule, str):
        return schedule
    return str(getattr(schedule, "name", getattr(schedule, "__name__", "custom")))


def rows_of(
    schedule: ScheduleFunction, num_stages: int, num_microbatches: int
) -> tuple[str, ...]:
    """The tasks of each submesh that a user's schedule asks for, as texts.

    Raises:
      TypeError: it returned something else than rows.
    """
    made = schedule(num_stages, num_microbatches)
    made = getattr(made, "rows", made)
    if isinstance(made, str) or not isinstance(made, Sequence):
        raise TypeError(
            f"A schedule returns a row of tasks for each submesh, such as "
            f"['0F0 0B0 0A', '1F0 1B0 1A'], but {schedule_name(schedule)} returned "
            f"{made!r}."
        )
    return tuple(
        row if isinstance(row, str) else " ".join(map(str, row)) for row in made
    )


def has_weight_tasks(
    schedule: str | ScheduleFunction, num_stages: int, num_microbatches: int
) -> bool:
    """Whether it runs the weight part of backward as a task of its own."""
    if isinstance(schedule, str):
        return schedule in _WITH_WEIGHT_TASKS
    return any("W" in row for row in rows_of(schedule, num_stages, num_microbatches))
