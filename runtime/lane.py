"""One submesh's walk through its instruction list, and what the submeshes share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

import jax

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
)
from .timeline import Event
from .transfer_plan import plan_transfer
from .transfers import Transfer


class Stopped(Exception):
    """Another stage failed, or the caller was interrupted."""


_STOP = object()


class StepOfLanes(Protocol):
    """What the lanes of one step share, in one process or on many hosts."""

    @property
    def program(self) -> PipelineProgram: ...
    @property
    def is_recorded(self) -> bool: ...
    @property
    def is_stopped(self) -> bool: ...
    @property
    def start(self) -> float: ...
    def begin(self, instruction: Instruction) -> None: ...
    def send(self, value: Value, source: int, target: int, array: Any) -> None: ...
    def receive(self, value: Value, source: int, target: int) -> Any: ...
    def wait_for_readers(self, arrays: Sequence[Any]) -> None: ...
    def fail(self, error: BaseException, note: str) -> None: ...


@dataclass
class Step:
    """What the lanes of one step share in one process."""

    program: PipelineProgram
    transfers: dict[tuple[str, int], Transfer]
    is_recorded: bool
    start: float = field(default_factory=perf_counter)
    error: BaseException | None = None
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _channels: dict[tuple[int, int], SimpleQueue[Any]] = field(default_factory=dict)

    def channel(self, source: int, target: int) -> SimpleQueue[Any]:
        """The queue of a pair of stages."""
        with self._lock:
            channel = self._channels.setdefault((source, target), SimpleQueue())
            if self.is_stopped:
                channel.put(_STOP)
            return channel

    def fail(self, error: BaseException, note: str) -> None:
        """Keep the first error, and stop every stage."""
        with self._lock:
            if self.error is None:
                error.add_note(note)
                self.error = error
        self.stop()

    def stop(self) -> None:
        """Wake every stage that waits, and let none start another instruction."""
        with self._lock:
            self.is_stopped = True
            for channel in self._channels.values():
                channel.put(_STOP)

    def begin(self, instruction: Instruction) -> None:
        """Nothing to do before an instruction."""

    def send(self, value: Value, source: int, target: int, array: Any) -> None:
        """Start the copy of a value to another stage; waits for nobody."""
        transfer = self._transfer(value.slot, source, target, array)
        self.channel(source, target).put((transfer, transfer.send(array)))

    def receive(self, value: Value, source: int, target: int) -> Any:
        """The next value that a stage sent to another, once it is there.

        Raises:
          Stopped: the step ends early.
        """
        taken = self.channel(source, target).get()
        if taken is _STOP:
            raise Stopped
        transfer, sent = taken
        return transfer.receive(sent)

    def wait_for_readers(self, arrays: Sequence[Any]) -> None:
        """Nothing to wait for: JAX itself keeps what a copy still reads."""

    def _transfer(self, slot: str, source: int, target: int, array: Any) -> Transfer:
        """How a slot goes to another stage, planned at its first array."""
        transfer = self.transfers.get((slot, target))
        if transfer is None:
            shardings = self.program.shardings
            plan = plan_transfer(
                array.shape,
                array.dtype,
                shardings[slot, source],
                shardings[slot, target],
            )
            transfer = self.transfers[slot, target] = Transfer(plan)
        return transfer


@dataclass
class Lane:
    """One submesh's walk through its list, in its own thread.

    `unfinished` are the runs that are launched and not waited for, of this step or the
    one before, each with its smallest output; `held` is what the submesh holds.
    """

    step: StepOfLanes
    list_: InstructionList
    runs_in_flight: int
    unfinished: deque[tuple[Run, Any]]
    held: dict[Held, Any]
    events: list[Event] = field(default_factory=list)
    _at: Instruction | None = None

    def run(self) -> None:
        """Every instruction; an error stops the step instead of being raised."""
        try:
            for instruction in self.list_.instructions:
                if self.step.is_stopped:
                    return
                self._at = instruction
                self.step.begin(instruction)
                self._execute(instruction)
        except Stopped:
            return
        except BaseException as error:
            self.step.fail(error, self._note())

    def _note(self) -> str:
        at = self._at
        if isinstance(at, Run):
            return f"raised by stage {at.task.stage} in task {at.task}: {at.name}"
        later = self.list_.instructions[self.list_.instructions.index(at) :]
        task = next((i.task for i in later if isinstance(i, Run)), None)
        return f"raised by submesh {self.list_.submesh} before task {task}: {at}"

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Run():
                self._execute_run(instruction)
            case Zero(value, stage):
                self.held[stage, value] = self.step.program.zeros[value.slot]()
            case Send(value, source, target):
                self.step.send(value, source, target, self.held[source, value])
            case Receive(value, source, target):
                self.held[target, value] = self.step.receive(value, source, target)
            case Free(value, stage):
                self.held.pop((stage, value), None)

    def _execute_run(self, run: Run) -> None:
        made, used = made_and_used(run)
        program = self.step.program.programs[run.program]
        inputs = [self.held[key] for key in used]
        if self.step.is_recorded:
            jax.block_until_ready(inputs)
        else:
            self._wait_for_a_run()
        self._at = run
        self.step.wait_for_readers([inputs[i] for i in program.donated])
        start = perf_counter()
        outputs = program.run(inputs)
        if self.step.is_recorded:
            jax.block_until_ready(outputs)
            times = (t - self.step.start for t in (start, perf_counter()))
            self.events.append(Event(self.list_.submesh, run.task, *times))
        elif outputs:
            smallest = min(outputs, key=lambda array: array.nbytes)
            self.unfinished.append((run, smallest))
        del inputs
        for key, array in zip(made, outputs, strict=True):
            self.held[key] = array

    def _wait_for_a_run(self) -> None:
        """Until fewer runs than may be unfinished are so."""
        if len(self.unfinished) < self.runs_in_flight:
            return
        while self.unfinished:
            self._at, array = self.unfinished.popleft()
            # A donated output is part of a later run: wait for that one.
            if not array.is_deleted():
                array.block_until_ready()
                return
