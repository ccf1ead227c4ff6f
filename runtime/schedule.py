"""Schedules: in which order each submesh runs the tasks of a step; pure data.

A stage runs on one submesh; an interleaved schedule gives a submesh several stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from autopar.plans.plan import TaskKind

_LETTERS: dict[TaskKind, str] = {
    "forward": "F",
    "backward": "B",
    "weight": "W",
    "apply": "A",
}
_KINDS: dict[str, TaskKind] = {letter: kind for kind, letter in _LETTERS.items()}
assert set(_LETTERS) == set(get_args(TaskKind)), "every kind of task has a letter"


@dataclass(frozen=True)
class Task:
    """One run of a stage's programs of one kind; prints as `2F0`: stage, kind, batch.

    `microbatch` is None for apply, which runs once a step and prints as `2A`.
    """

    stage: int
    microbatch: int | None
    kind: TaskKind

    def __str__(self) -> str:
        number = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{_LETTERS[self.kind]}{number}"

    @staticmethod
    def parse(text: str) -> Task:
        """The task that prints as `text`."""
        match = re.fullmatch(r"(\d+)(?:([FBW])(\d+)|(A))", text)
        if match is None:
            raise ValueError(
                f"a task is a stage, one of F, B and W and a microbatch, or a stage "
                f"and A, but got {text!r}; write it as 2F0 or 2A."
            )
        stage, letter, microbatch, apply = match.groups()
        if apply:
            return Task(int(stage), None, "apply")
        return Task(int(stage), int(microbatch), _KINDS[letter])


@dataclass(frozen=True)
class Schedule:
    """The ordered tasks of each submesh; prints as a grid, a row a submesh.

    Raises:
      ValueError: a task comes twice or is missing, or a stage is on two submeshes.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        times = Counter(task for row in self.rows for task in row)
        repeated = [str(task) for task, number in times.items() if number > 1]
        if repeated:
            raise ValueError(
                f"a schedule runs each task once, but {', '.join(repeated)} came more "
                f"often in {self.name!r}; remove the repeats."
            )
        homes = {(task.stage, i) for i, row in enumerate(self.rows) for task in row}
        rows_of = Counter(stage for stage, _ in homes)
        scattered = sorted(stage for stage, number in rows_of.items() if number > 1)
        if scattered:
            raise ValueError(
                f"a stage runs on one submesh, but stages {scattered} of {self.name!r} "
                f"are in several rows; keep all their tasks in one."
            )
        outside = [
            str(task)
            for task in times
            if task.stage >= self.num_stages
            or (task.microbatch or 0) >= self.num_microbatches
        ]
        if outside:
            raise ValueError(
                f"a schedule of {self.num_stages} stages and {self.num_microbatches} "
                f"microbatches cannot run {', '.join(outside)}; remove them."
            )

    @cached_property
    def has_weight_tasks(self) -> bool:
        """Whether weights have tasks of their own, apart from backward."""
        return any(task.kind == "weight" for row in self.rows for task in row)

    @cached_property
    def submesh_by_stage(self) -> dict[int, int]:
        """On which submesh (row) each stage runs."""
        return {task.stage: i for i, row in enumerate(self.rows) for task in row}

    def __str__(self) -> str:
        return f"{self.name}\n{format_grid(self.rows)}"


def format_grid(
    rows: Sequence[Sequence[Task]], marked: Sequence[Task] = (), columns: int = 17
) -> str:
    """Rows of tasks as text, `columns` tasks a line; `marked` ones stand in `>  <`."""
    cells = [[f">{t}<" if t in marked else f" {t} " for t in row] for row in rows]
    width = max((len(cell) for row in cells for cell in row), default=0)
    longest = max((len(row) for row in cells), default=0)
    lines = []
    for start in range(0, longest, columns):
        if start:
            lines.append("")
        for index, row in enumerate(cells):
            part = row[start : start + columns]
            text = "".join(cell.ljust(width) for cell in part)
            lines.append(f"submesh {index}:{text}".rstrip())
    return "\n".join(lines)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Every microbatch forward, in order: for a step without gradients."""
    name, sizes = "forward_only", (num_stages, num_microbatches)
    return _schedule(name, *sizes, lambda forwards, _, stage: forwards)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.3).

    Every stage keeps up to `num_microbatches` microbatches in flight. Backwards run in
    the order of 1F1B, so that both add gradients up in the same order, bit for bit.
    """
    name, sizes = "gpipe", (num_stages, num_microbatches)
    return _schedule(name, *sizes, lambda forwards, backwards, _: forwards + backwards)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward once the pipeline is full (PipeDream-flush).

    Stage i of p keeps at most p - i microbatches in flight, with GPipe's makespan.
    """
    return _one_by_one("one_f_one_b", num_stages, num_microbatches, 1)


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with twice as many forwards ahead (Zhuang et al. 2023, section 4).

    A stage of 1F1B waits for what it sent to come back; here stage i of p, with up to
    2 (p - i) - 1 microbatches in flight, has work while values travel.
    """
    return _one_by_one("eager_1f1b", num_stages, num_microbatches, 2)


def _one_by_one(
    name: str, num_stages: int, num_microbatches: int, warm_up: int
) -> Schedule:
    """Stage i of p runs `warm_up` (p - i - 1) forwards ahead of its backwards."""

    def row(forwards: list[Task], backwards: list[Task], stage: int) -> list[Task]:
        return _alternate(forwards, backwards, warm_up * (num_stages - stage - 1))

    return _schedule(name, num_stages, num_microbatches, row)


def interleaved(num_stages: int, num_microbatches: int, num_submeshes: int) -> Schedule:
    """1F1B with several stages a submesh, stage s on submesh s mod `num_submeshes`.

    The bubble shrinks by stages a submesh; transfers grow by as much (Narayanan et al.
    2021, section 2.2).

    Raises:
      ValueError: stages or microbatches are no multiple of `num_submeshes`.
    """
    _check(num_stages, num_microbatches)
    if num_submeshes < 1 or num_stages % num_submeshes:
        raise ValueError(
            f"an interleaved schedule gives every submesh equally many stages, but got "
            f"{num_stages} stages for {num_submeshes} submeshes; use a multiple."
        )
    if num_microbatches % num_submeshes:
        raise ValueError(
            f"an interleaved schedule takes microbatches in groups of a submesh each, "
            f"but {num_microbatches} is no multiple of {num_submeshes}; use "
            f"{-(-num_microbatches // num_submeshes) * num_submeshes}."
        )
    num_chunks = num_stages // num_submeshes
    rows = []
    for submesh in range(num_submeshes):
        stages = range(submesh, num_stages, num_submeshes)
        forwards: list[Task] = []
        backwards: list[Task] = []
        for start in range(0, num_microbatches, num_submeshes):
            group = range(start, start + num_submeshes)
            for stage in stages:
                forwards += _run("forward", stage, group)
            for stage in reversed(stages):
                backwards += _run("backward", stage, group)
        num_ahead = 2 * (num_submeshes - submesh - 1) + (num_chunks - 1) * num_submeshes
        tasks = _alternate(forwards, backwards, num_ahead)
        rows.append((*tasks, *(Task(stage, None, "apply") for stage in stages)))
    return Schedule("interleaved", num_stages, num_microbatches, tuple(rows))


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B with W tasks in its bubble.

    Stage i runs W tasks, of weight gradients, i microbatches late. With equal times of
    F, B and W a third of 1F1B's bubble is left, and no stage holds more microbatches
    than the first of 1F1B: p of p stages.
    """
    return _zero_bubble("zero_bubble_h1", num_stages, num_microbatches, 1)


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2 (Qi et al. 2023, section 2.2): no bubble, for twice the microbatches held.

    Every stage is busy from its first task to its last, with up to 2p - 1 microbatches
    in flight on each of p stages, if there are as many.
    """
    return _zero_bubble("zero_bubble_h2", num_stages, num_microbatches, 2)


def _zero_bubble(
    name: str, num_stages: int, num_microbatches: int, warm_up: int
) -> Schedule:
    """Stage i of p runs `warm_up` (p - i - 1) forwards ahead, W `warm_up` i late.

    So all stages hold as many microbatches, one forward and one W task apart.
    """

    def row(forwards: list[Task], backwards: list[Task], stage: int) -> list[Task]:
        late, tasks = warm_up * stage, list[Task]()
        waiting = iter(_run("weight", stage, range(num_microbatches)))
        for task in _alternate(forwards, backwards, warm_up * (num_stages - stage - 1)):
            tasks.append(task)
            if task.kind == "backward" and (task.microbatch or 0) >= late:
                tasks.append(next(waiting))
        return [*tasks, *waiting]

    return _schedule(name, num_stages, num_microbatches, row)


def _schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    row: Callable[[list[Task], list[Task], int], list[Task]],
) -> Schedule:
    """A row a stage, of its forwards and backwards and the optimizer update."""
    _check(num_stages, num_microbatches)
    rows = []
    for stage in range(num_stages):
        forwards = _run("forward", stage, range(num_microbatches))
        backwards = _run("backward", stage, range(num_microbatches))
        tasks = row(forwards, backwards, stage)
        rows.append((*tasks, Task(stage, None, "apply")))
    return Schedule(name, num_stages, num_microbatches, tuple(rows))


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a schedule needs one stage and one microbatch at least, but got "
            f"{num_stages} and {num_microbatches}; use 1 or more of each."
        )


def _run(kind: TaskKind, stage: int, microbatches: Iterable[int]) -> list[Task]:
    return [Task(stage, microbatch, kind) for microbatch in microbatches]


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], num_ahead: int
) -> list[Task]:
    """`num_ahead` forwards, then forward and backward in turn, then what is left."""
    num_ahead = min(num_ahead, len(forwards))
    steady = forwards[num_ahead:]
    pairs = zip(steady, backwards, strict=False)
    return [
        *forwards[:num_ahead],
        *(task for pair in pairs for task in pair),
        *backwards[len(steady) :],
    ]
