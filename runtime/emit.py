"""From a pipeline program and a schedule to one instruction list a submesh.

A value is sent right after the run that makes it (state: at the start of the step),
received right before the first run that reads it, and freed after its last use. What
one stage sends to another is received in the order sent: a pair needs one queue, and
none of its receives can wait for a send that comes after one it has not taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from autopar.lowering.programs import PipelineProgram

from .instructions import (
    Free,
    Held,
    Instruction,
    InstructionList,
    Receive,
    Run,
    Send,
    Value,
    Zero,
    made_and_used,
    made_in,
)
from .schedule import Schedule, Task


def emit(program: PipelineProgram, schedule: Schedule) -> tuple[InstructionList, ...]:
    """What every submesh does in a step of `program`, in the order of `schedule`.

    Raises:
      ValueError: by the schedule a slot is read before it is made, or nothing makes it.
    """
    wanted = program.num_stages, program.num_microbatches
    given = schedule.num_stages, schedule.num_microbatches
    assert wanted == given, f"{schedule.name!r} has {given} and not {wanted}"
    flow = _Flow(program, schedule)
    flow.check_results()
    sending = [list(flow.with_sends(runs)) for runs in flow.runs_by_row]
    channels = _channels(sending)
    receiving = [list(flow.with_receives(row, channels)) for row in sending]
    return tuple(
        InstructionList(i, tuple(flow.with_frees(row)))
        for i, row in enumerate(receiving)
    )


def state_keys(program: PipelineProgram) -> dict[str, Held]:
    """Where each slot of the state is held."""
    slots = program.slots.items()
    return {n: (slot.stage, Value(n)) for n, slot in slots if slot.kind == "state"}


def result_keys(
    program: PipelineProgram, lists: Sequence[InstructionList]
) -> dict[str, tuple[Held, ...]]:
    """What each result slot holds in the end: one value, or one for each microbatch."""
    made, numbers = made_in(lists), range(program.num_microbatches)
    found: dict[str, tuple[Held, ...]] = {}
    for name, slot in program.slots.items():
        if slot.kind == "result":
            once = slot.stage, Value(name)
            many = tuple((slot.stage, Value(name, i)) for i in numbers)
            found[name] = (once,) if once in made else many
    return found


def results_of(
    keys: Mapping[str, Sequence[Held]], held: Mapping[Held, Any]
) -> dict[str, Any]:
    """The results of a step; one that is made once a microbatch is a list."""
    return {
        name: held[own[0]]
        if own[0][1].microbatch is None
        else [held[key] for key in own]
        for name, own in keys.items()
    }


@dataclass(frozen=True)
class _Flow:
    """Which values each run reads and makes."""

    program: PipelineProgram
    schedule: Schedule

    @cached_property
    def runs_by_row(self) -> tuple[tuple[Run, ...], ...]:
        return tuple(
            tuple(
                run
                for _, tasks in groupby(row, key=lambda task: task.kind == "apply")
                for run in self._runs(tuple(tasks))
            )
            for row in self.schedule.rows
        )

    def _runs(self, tasks: Sequence[Task]) -> list[Run]:
        """Runs in the order of their tasks; those of apply in the order of programs.

        The apply programs of two stages may need each other's results in turn.
        """
        runs = [
            self._run(task, index)
            for task in tasks
            for index in self.programs_of.get((task.stage, task.kind), ())
        ]
        if tasks[0].kind == "apply":
            runs.sort(key=lambda run: run.program)
        return runs

    @cached_property
    def programs_of(self) -> dict[tuple[int, str], list[int]]:
        """The positions of the programs of each stage and kind."""
        found: dict[tuple[int, str], list[int]] = {}
        for index, body in enumerate(self.program.programs):
            found.setdefault((body.stage, body.kind), []).append(index)
        return found

    def _run(self, task: Task, index: int) -> Run:
        body = self.program.programs[index]
        inputs = tuple(self.value(slot, task) for slot in body.inputs)
        return Run(
            task, index, inputs, tuple(self.value(s, task) for s in body.outputs)
        )

    @cached_property
    def once_a_step(self) -> frozenset[str]:
        """Slots with one value a step."""
        made_by_apply = {
            name
            for body in self.program.programs
            if body.kind == "apply"
            for name in body.outputs
        }
        lasting = {
            name
            for name, slot in self.program.slots.items()
            if slot.kind in ("state", "gradient")
        }
        return frozenset(made_by_apply | lasting)

    def value(self, slot: str, task: Task) -> Value:
        assert slot in self.program.slots, f"a program of {task} names {slot!r}"
        if slot in self.once_a_step:
            return Value(slot)
        assert task.microbatch is not None, f"{task} reads {slot!r} of a microbatch"
        return Value(slot, task.microbatch)

    def home(self, value: Value) -> int:
        return self.program.slots[value.slot].stage

    def kind(self, value: Value) -> str:
        return self.program.slots[value.slot].kind

    @cached_property
    def readers(self) -> dict[Value, tuple[int, ...]]:
        """The stages that a value must be sent to, in stage order."""
        stages: dict[Value, set[int]] = {}
        for row in self.runs_by_row:
            for run in row:
                for value in run.inputs:
                    is_here = self.home(value) == run.task.stage
                    if not is_here and self.kind(value) != "batch":
                        stages.setdefault(value, set()).add(run.task.stage)
        return {value: tuple(sorted(found)) for value, found in stages.items()}

    @cached_property
    def last_writer(self) -> dict[Value, Run]:
        """Behind which run a value that is not state is complete."""
        return {
            value: run
            for row in self.runs_by_row
            for run in row
            for value in run.outputs
        }

    def check_results(self) -> None:
        made = {value.slot for value in self.last_writer}
        for name, slot in self.program.slots.items():
            if slot.kind == "result" and name not in made:
                raise ValueError(
                    f"a result is made in the step, but no scheduled program makes "
                    f"{name!r}; schedule the task that does, or drop the slot."
                )

    def with_sends(self, runs: Sequence[Run]) -> Iterator[Instruction]:
        stages = {run.task.stage for run in runs}
        for value, targets in self.readers.items():
            home = self.home(value)
            if self.kind(value) == "state" and home in stages:
                yield from (Send(value, home, target) for target in targets)
        for run in runs:
            yield run
            for value in run.outputs:
                if self.kind(value) == "state" or self.last_writer[value] != run:
                    continue
                for target in self.readers.get(value, ()):
                    yield Send(value, run.task.stage, target)

    def with_receives(
        self, row: Sequence[Instruction], channels: dict[tuple[int, int], deque[Value]]
    ) -> Iterator[Instruction]:
        """Adds receives and zeros, and checks that what is read is there."""
        held = self._held_at_start(row)
        updated: set[Value] = set()
        for instruction in row:
            if not isinstance(instruction, Run):
                yield instruction
                continue
            stage = instruction.task.stage
            for value in instruction.inputs:
                home = self.home(value)
                is_old = home == stage and value in updated
                assert not is_old, f"{instruction.name} reads {value} as it was before"
                if (stage, value) in held:
                    continue
                if home == stage and self.kind(value) == "gradient":
                    yield Zero(value, stage)
                elif home != stage and value in channels.get((home, stage), ()):
                    for receive in _receive_up_to(value, home, stage, channels):
                        held.add((stage, receive.value))
                        yield receive
                else:
                    raise self._unmade(value, instruction)
                held.add((stage, value))
            for value in instruction.outputs:
                self._check_written(value, instruction)
                held.add((stage, value))
                if self.kind(value) == "state":
                    updated.add(value)
            yield instruction

    def _unmade(self, value: Value, run: Run) -> ValueError:
        writer = self.last_writer.get(value)
        home = self.home(value)
        why = f"no scheduled program of stage {home} makes it"
        if writer is not None:
            why = f"{writer.name} makes it later; move {run.task} behind {writer.task}"
        return ValueError(
            f"a slot is made before it is read, but {run.name} reads the "
            f"{self.kind(value)} slot {value} of stage {home} and {why}."
        )

    def _held_at_start(self, row: Sequence[Instruction]) -> set[Held]:
        """State at home, and batch values wherever they are read."""
        runs = [instruction for instruction in row if isinstance(instruction, Run)]
        stages = {run.task.stage for run in runs}
        state = {
            (slot.stage, Value(name))
            for name, slot in self.program.slots.items()
            if slot.kind == "state" and slot.stage in stages
        }
        batch = {
            (run.task.stage, value)
            for run in runs
            for value in run.inputs
            if self.kind(value) == "batch"
        }
        return state | batch

    def _check_written(self, value: Value, run: Run) -> None:
        home, kind = self.home(value), self.kind(value)
        is_own = home == run.task.stage and kind != "batch"
        assert is_own, f"{run.name} makes the {kind} slot {value} of stage {home}"
        last = self.last_writer[value]
        assert kind == "gradient" or last == run, f"{run.name} and {last} make {value}"

    def with_frees(self, row: Sequence[Instruction]) -> Iterator[Instruction]:
        """Adds frees, walking backwards: the first use met is the last one."""
        uses = [made_and_used(instruction) for instruction in row]
        seen = {held for made, used in uses for held in (*made, *used)}
        live = {
            (stage, value)
            for stage, value in seen
            if self.kind(value) in ("state", "result") and self.home(value) == stage
        }
        backwards: list[Instruction] = []
        for instruction, (made, used) in zip(
            reversed(row), reversed(uses), strict=True
        ):
            if isinstance(instruction, Run):
                self._check_donated(instruction, live)
            touched = dict.fromkeys([*made, *used])
            backwards += [
                Free(v, stage) for stage, v in touched if (stage, v) not in live
            ]
            backwards.append(instruction)
            live -= set(made)
            live |= set(used)
        return reversed(backwards)

    def _check_donated(self, run: Run, live: set[Held]) -> None:
        for position in self.program.programs[run.program].donated:
            value = run.inputs[position]
            is_read_again = (run.task.stage, value) in live and value not in run.outputs
            is_once = not is_read_again and run.inputs.count(value) == 1
            assert is_once, f"{run.name} donates {value}, which is read again"


def _channels(
    rows: Sequence[Sequence[Instruction]],
) -> dict[tuple[int, int], deque[Value]]:
    """What each stage sends to each other stage, in order."""
    channels: dict[tuple[int, int], deque[Value]] = {}
    for row in rows:
        for instruction in row:
            if isinstance(instruction, Send):
                pair = (instruction.source, instruction.target)
                channels.setdefault(pair, deque()).append(instruction.value)
    return channels


def _receive_up_to(
    value: Value,
    source: int,
    target: int,
    channels: dict[tuple[int, int], deque[Value]],
) -> Iterator[Receive]:
    """Receives of all that was sent before `value`, and of `value` itself."""
    channel = channels[source, target]
    while channel:
        sent = channel.popleft()
        yield Receive(sent, source, target)
        if sent == value:
            return
