"""What a submesh holds while it runs each of its tasks, without running any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .instructions import Free, Held, InstructionList, Run, made_and_used
from .schedule import Task


@dataclass(frozen=True)
class HeldByTask:
    """While a task runs: how many values of each slot are held, and their bytes."""

    task: Task
    counts: Counter[str]
    bytes: int


def held_by_task(
    list_: InstructionList, slot_bytes: Callable[[str, int], int]
) -> tuple[HeldByTask, ...]:
    """What is held at each task; of one with several programs, at the fullest.

    Args:
      list_: the instructions of a submesh.
      slot_bytes: bytes of a slot's value on one device of a stage.
    """
    held = _held_from_the_start(list_)
    found: dict[Task, HeldByTask] = {}
    for instruction in list_.instructions:
        held |= set(made_and_used(instruction)[0])
        if isinstance(instruction, Run):
            total = sum(slot_bytes(value.slot, stage) for stage, value in held)
            known = found.get(instruction.task)
            if known is None or known.bytes < total:
                counts = Counter(value.slot for _, value in held)
                found[instruction.task] = HeldByTask(instruction.task, counts, total)
        if isinstance(instruction, Free):
            held.discard((instruction.stage, instruction.value))
    return tuple(found.values())


def _held_from_the_start(list_: InstructionList) -> set[Held]:
    """State and batch: what the list uses and does not make."""
    made: set[Held] = set()
    given: set[Held] = set()
    for instruction in list_.instructions:
        makes, uses = made_and_used(instruction)
        given |= {each for each in uses if each not in made}
        made |= set(makes)
    return given
