"""What one submesh does in a step: a list of instructions, as data and as text.

    run 1F2 program 3: "w" "x"@2 -> "y"@2  run a stage program of task 1F2
    zero "grads.w" on 1                    make the first value of a gradient
    send "y"@2 from 1 to 2                 hand over a value; waits for nobody
    receive "x"@2 from 0 to 1              wait for the next value of a pair of stages
    free "x"@2 on 1                        drop a value after its last use

A gradient is accumulated by the program that makes it, so nothing accumulates here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Task


@dataclass(frozen=True)
class Value:
    """What a slot holds for one microbatch, or for the step if that is None."""

    slot: str
    microbatch: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f"@{self.microbatch}"
        return json.dumps(self.slot) + microbatch


@dataclass(frozen=True)
class Run:
    """Run the program at position `program` of the `PipelineProgram` for a task.

    What it reads and makes is held by the task's stage; a value in both is replaced.
    """

    task: Task
    program: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """Which run it is, without what it reads and makes."""
        return f"run {self.task} program {self.program}"

    def __str__(self) -> str:
        inputs, outputs = map(str, self.inputs), map(str, self.outputs)
        return " ".join([f"{self.name}:", *inputs, "->", *outputs])


@dataclass(frozen=True)
class Zero:
    """Make the first value of a gradient."""

    value: Value
    stage: int

    def __str__(self) -> str:
        return f"zero {self.value} on {self.stage}"


@dataclass(frozen=True)
class Send:
    """Hand a value of stage `source` to stage `target`; does not wait."""

    value: Value
    source: int
    target: int

    def __str__(self) -> str:
        return f"send {self.value} from {self.source} to {self.target}"


@dataclass(frozen=True)
class Receive:
    """Wait for the next value that stage `source` sent to stage `target`."""

    value: Value
    source: int
    target: int

    def __str__(self) -> str:
        return f"receive {self.value} from {self.source} to {self.target}"


@dataclass(frozen=True)
class Free:
    """Drop a value that a stage holds."""

    value: Value
    stage: int

    def __str__(self) -> str:
        return f"free {self.value} on {self.stage}"


Instruction = Run | Zero | Send | Receive | Free
Held = tuple[int, Value]  # a value as one stage holds it


def made_and_used(instruction: Instruction) -> tuple[list[Held], list[Held]]:
    """What a submesh holds after an instruction, and what it must hold before."""
    match instruction:
        case Run(task, _, inputs, outputs):
            made = [(task.stage, value) for value in outputs]
            return made, [(task.stage, value) for value in inputs]
        case Zero(value, stage):
            return [(stage, value)], []
        case Receive(value, _, target):
            return [(target, value)], []
        case Send(value, source, _):
            return [], [(source, value)]
        case Free():
            return [], []


@dataclass(frozen=True)
class InstructionList:
    """All that one submesh does in a step, in order."""

    submesh: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        head = f"autopar instructions 1, submesh {self.submesh}"
        return "\n".join([head, *map(str, self.instructions)])


def step_inputs(lists: Sequence[InstructionList]) -> tuple[tuple[Held, ...], ...]:
    """State and batch values that each submesh uses and nothing in the step makes."""
    inputs = []
    for list_ in lists:
        made: set[Held] = set()
        first: dict[Held, None] = {}
        for instruction in list_.instructions:
            now_made, used = made_and_used(instruction)
            first.update((key, None) for key in used if key not in made)
            made.update(now_made)
        inputs.append(tuple(first))
    return tuple(inputs)


def made_in(lists: Sequence[InstructionList]) -> set[Held]:
    """What some submesh makes, or receives, in a step."""
    every = (instruction for list_ in lists for instruction in list_.instructions)
    return {key for instruction in every for key in made_and_used(instruction)[0]}
