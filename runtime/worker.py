"""Run a pipeline program on the devices of this process, one thread a submesh.

The threads live as long as the executable. In a step each goes through its instruction
list; a pair of stages that send to each other shares a queue. A run is launched and not
waited for, but at most two of a submesh are unfinished at any time: a
device that computes has its next program waiting, and virtual CPU devices, which
deadlock when many programs are launched at once, get few.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from autopar.lowering.programs import PipelineProgram

from .emit import emit, result_keys, results_of, state_keys
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
    step_inputs,
)
from .schedule import Schedule
from .simulate import simulate
from .timeline import Event, Timeline
from .transfers import Transfer, plan_transfer

_STOP = object()
_RUNS_IN_FLIGHT = 2  # one is launched while another is computed


class Stopped(Exception):
    """Another stage failed, or the caller was interrupted."""


class Transport(Protocol):
    """How values get to stages of other hosts."""

    def send(self, value: Value, source: int, target: int, array: Any) -> None: ...
    def receive(self, value: Value, source: int, target: int) -> Any: ...
    def wait_for_readers(self, arrays: Sequence[Any]) -> None: ...


@dataclass
class Step:
    """What the lanes of one step share in one process.

    `elsewhere` are the stages of other hosts, which the transport reaches.
    """

    program: PipelineProgram
    transfers: dict[tuple[str, int], Transfer]
    is_recorded: bool
    start: float = field(default_factory=perf_counter)
    transport: Transport | None = None
    elsewhere: Collection[int] = ()
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

    def send(self, value: Value, source: int, target: int, array: Any) -> None:
        """Start the copy of a value to another stage; waits for nobody."""
        if target in self.elsewhere:
            assert self.transport is not None, "it reaches other hosts"
            return self.transport.send(value, source, target, array)
        transfer = self._transfer(value.slot, source, target, array)
        self.channel(source, target).put((transfer, transfer.send(array)))

    def receive(self, value: Value, source: int, target: int) -> Any:
        """The next value that a stage sent to another, once it is there.

        Raises:
          Stopped: the step ends early.
        """
        if source in self.elsewhere:
            assert self.transport is not None, "it reaches other hosts"
            return self.transport.receive(value, source, target)
        taken = self.channel(source, target).get()
        if taken is _STOP:
            raise Stopped
        transfer, sent = taken
        return transfer.receive(sent)

    def wait_for_readers(self, arrays: Sequence[Any]) -> None:
        """Until other hosts have read these; JAX keeps what a copy still reads."""
        if self.transport is not None:
            self.transport.wait_for_readers(arrays)

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

    step: Step
    list_: InstructionList
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
        if len(self.unfinished) < _RUNS_IN_FLIGHT:
            return
        while self.unfinished:
            self._at, array = self.unfinished.popleft()
            # A donated output is part of a later run: wait for that one.
            if not array.is_deleted():
                array.block_until_ready()
                return


class PipelineExecutable:
    """A pipeline program and its steps; call it, and close it or let it be collected.

    Arguments:
      program: the stages, with their arrays' shardings.
      schedule: in which order each submesh runs its tasks.

    Raises:
      ValueError: the schedule does not fit the program, or deadlocks.
    """

    def __init__(self, program: PipelineProgram, schedule: Schedule) -> None:
        self.program = program
        self.instructions = emit(program, schedule)
        simulate(self.instructions)  # refuses a deadlock before any thread waits
        self._inputs = step_inputs(self.instructions)
        self._state = state_keys(program)
        self._results = result_keys(program, self.instructions)
        self._unfinished: tuple[deque[tuple[Run, Any]], ...] = tuple(
            deque() for _ in self.instructions
        )
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._one_step = threading.Lock()
        self._threads = tuple(
            ThreadPoolExecutor(1, f"autopar-submesh-{list_.submesh}")
            for list_ in self.instructions
        )

    def __call__(
        self,
        state: Mapping[str, Any],
        batch: Mapping[str, Sequence[Any]],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step: the new state and the results, by slot name.

        `batch` holds each batch slot's value for every microbatch. Arrays that lie
        elsewhere are moved first. State that a program donates is gone afterwards. A
        result that is made once a microbatch comes as a list.

        Raises:
          ValueError: a slot's value was donated before.
          Exception: whatever a stage raised, with a note naming stage, task and
            instruction. The other stages have stopped then, and the executable can be
            called again.
        """
        new_state, results, _ = self._step(state, batch, is_recorded=False)
        return new_state, results

    def record(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
        """A step that waits for every run, and when each task ran."""
        return self._step(state, batch, is_recorded=True)

    def close(self) -> None:
        """End the threads; the executable cannot be called afterwards."""
        for thread in self._threads:
            thread.shutdown()

    def __enter__(self) -> PipelineExecutable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(
        self,
        state: Mapping[str, Any],
        batch: Mapping[str, Sequence[Any]],
        is_recorded: bool,
    ) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
        _check_given(self.program, state, batch)
        placed = self._place(state, batch)
        with self._one_step:
            step = Step(self.program, self._transfers, is_recorded)
            lanes = [
                Lane(step, list_, unfinished, held)
                for list_, unfinished, held in zip(
                    self.instructions, self._unfinished, placed, strict=True
                )
            ]
            self._run(step, lanes)
        held = {key: array for lane in lanes for key, array in lane.held.items()}
        events = sorted((e for i in lanes for e in i.events), key=lambda e: e.start)
        timeline = Timeline(len(lanes), tuple(events))
        new_state = {
            slot: held.get(key, state[slot]) for slot, key in self._state.items()
        }
        return new_state, results_of(self._results, held), timeline

    def _run(self, step: Step, lanes: Sequence[Lane]) -> None:
        """All lanes to their end, or to the first error, which is raised."""
        futures = [
            thread.submit(lane.run)
            for thread, lane in zip(self._threads, lanes, strict=True)
        ]
        try:
            wait(futures)
        except BaseException:  # an interrupt of the caller: stop the stages, then go
            step.stop()
            wait(futures)
            raise
        for future in futures:
            future.result()
        if step.error is not None:
            for unfinished in self._unfinished:
                unfinished.clear()
            raise step.error

    def _place(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> list[dict[Held, Any]]:
        """What each submesh holds when the step begins, moved there if need be."""
        seen: set[int] = set()
        placed: list[dict[Held, Any]] = [{} for _ in self._inputs]
        moving: list[tuple[int, Held]] = []
        for submesh, keys in enumerate(self._inputs):
            for stage, value in keys:
                slot, number = value.slot, value.microbatch
                array = state[slot] if number is None else batch[slot][number]
                if number is None and id(array) in seen:
                    array = jax.numpy.copy(array)  # one buffer may be donated once
                seen.add(id(array))
                placed[submesh][stage, value] = array
                sharding = self.program.shardings[slot, stage]
                if not _lies_in(array, sharding):
                    moving.append((submesh, (stage, value)))
        moved = jax.device_put(
            [placed[submesh][key] for submesh, key in moving],
            [self.program.shardings[key[1].slot, key[0]] for _, key in moving],
        )
        for (submesh, key), array in zip(moving, moved, strict=True):
            placed[submesh][key] = array
        return placed


def _lies_in(array: Any, sharding: NamedSharding) -> bool:
    return (
        isinstance(array, jax.Array)
        and array.committed
        and array.sharding.is_equivalent_to(sharding, array.ndim)
    )


def _check_given(
    program: PipelineProgram,
    state: Mapping[str, Any],
    batch: Mapping[str, Sequence[Any]],
) -> None:
    for kind, given in (("state", state), ("batch", batch)):
        wanted = {name for name, slot in program.slots.items() if slot.kind == kind}
        assert given.keys() == wanted, f"{sorted(wanted ^ given.keys())} of the {kind}"
    for name, values in batch.items():
        assert len(values) == program.num_microbatches, f"{name!r} has {len(values)}"
    leaves = [*state.items(), *((name, x) for name in batch for x in batch[name])]
    for name, array in leaves:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(
                f"each array may be donated once, but {name!r} was given to a step "
                f"before and its memory holds the next state; pass what that returned."
            )
