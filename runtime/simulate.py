"""Run instruction lists without devices: deadlocks, memory, and a timeline."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from autopar.lowering.programs import PipelineProgram
from autopar.plans.plan import TaskKind

from .emit import emit
from .instructions import (
    Free,
    Held,
    Instruction,
    InstructionList,
    Receive,
    Run,
    Send,
    Value,
    made_and_used,
    step_inputs,
)
from .schedule import Schedule, Task, format_grid
from .timeline import Event, Timeline


@dataclass(frozen=True)
class Simulation:
    """What running the lists would take; tuples are by submesh.

    `peak_microbatches` counts (stage, microbatch) pairs between forward and the last
    task of the pair, backward or weight;
    `peak_bytes` the values that instructions hold, received ones from when they are
    taken.
    """

    timeline: Timeline
    peak_microbatches: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def simulate(
    lists: Sequence[InstructionList],
    task_seconds: Callable[[Task], float] = lambda _: 0.0,
    transfer_seconds: Callable[[Send], float] = lambda _: 0.0,
    slot_bytes: Callable[[str, int], int] = lambda slot, stage: 0,
) -> Simulation:
    """Run the lists of all submeshes to their end.

    Arguments:
      task_seconds: of the first program of a task; further ones of it are free.
      transfer_seconds: of a send; sends of one pair of stages follow each other, and
        occupy neither stage.
      slot_bytes: bytes of a slot's value on a stage.

    Raises:
      ValueError: a deadlock: the message shows the schedule, marked where each submesh
        waits.
    """
    channels: dict[tuple[int, int], deque[tuple[Value, float]]] = defaultdict(deque)
    link_free_at: dict[tuple[int, int], float] = defaultdict(float)
    lanes = [_start(list_, slot_bytes) for list_ in lists]
    moved = True
    while moved:
        moved = False
        for lane in lanes:
            while not lane.is_done:
                instruction = lane.instruction
                if isinstance(instruction, Receive):
                    channel = channels[instruction.source, instruction.target]
                    if not channel:
                        break
                    value, arrival = channel.popleft()
                    assert value == instruction.value, f"{value} for {instruction}"
                    lane.clock = max(lane.clock, arrival)
                elif isinstance(instruction, Send):
                    pair = (instruction.source, instruction.target)
                    start = max(lane.clock, link_free_at[pair])
                    link_free_at[pair] = start + transfer_seconds(instruction)
                    channels[pair].append((instruction.value, link_free_at[pair]))
                elif isinstance(instruction, Run):
                    lane.run(instruction.task, task_seconds)
                lane.hold(instruction, slot_bytes)
                lane.position += 1
                moved = True
    if not all(lane.is_done for lane in lanes):
        raise _deadlock(lanes)
    events = sorted((e for lane in lanes for e in lane.events), key=lambda e: e.start)
    return Simulation(
        Timeline(len(lanes), tuple(events)),
        tuple(lane.peak_microbatches for lane in lanes),
        tuple(lane.peak_bytes for lane in lanes),
    )


@dataclass
class _Lane:
    """How far one submesh has come."""

    list_: InstructionList
    position: int = 0
    clock: float = 0.0
    events: list[Event] = field(default_factory=list)
    bytes_by_value: dict[Held, int] = field(default_factory=dict)
    ran: set[Task] = field(default_factory=set)
    in_flight: set[tuple[int, int | None]] = field(default_factory=set)
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_microbatches: int = 0

    @cached_property
    def last_kind(self) -> TaskKind:
        """Of a microbatch's tasks: behind it, what it keeps is needed no longer."""
        kinds = {task.kind for task in _tasks(self.list_.instructions)}
        return "weight" if "weight" in kinds else "backward"

    @property
    def is_done(self) -> bool:
        return self.position == len(self.list_.instructions)

    @property
    def instruction(self) -> Instruction:
        return self.list_.instructions[self.position]

    def run(self, task: Task, task_seconds: Callable[[Task], float]) -> None:
        if task in self.ran:
            return
        self.ran.add(task)
        start = self.clock
        self.clock += task_seconds(task)
        self.events.append(Event(self.list_.submesh, task, start, self.clock))
        key = (task.stage, task.microbatch)
        if task.kind == "forward":
            self.in_flight.add(key)
        self.peak_microbatches = max(self.peak_microbatches, len(self.in_flight))
        if task.kind == self.last_kind:
            self.in_flight.discard(key)

    def hold(
        self, instruction: Instruction, slot_bytes: Callable[[str, int], int]
    ) -> None:
        made, _ = made_and_used(instruction)
        for stage, value in made:
            self._change(stage, value, slot_bytes(value.slot, stage))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if isinstance(instruction, Free):
            self._change(instruction.stage, instruction.value, 0)

    def _change(self, stage: int, value: Value, num_bytes: int) -> None:
        self.held_bytes += num_bytes - self.bytes_by_value.pop((stage, value), 0)
        if num_bytes:
            self.bytes_by_value[stage, value] = num_bytes


def _start(list_: InstructionList, slot_bytes: Callable[[str, int], int]) -> _Lane:
    """A lane that holds what its list uses and does not make: state and batch."""
    lane = _Lane(list_)
    for stage, value in step_inputs([list_])[0]:
        lane._change(stage, value, slot_bytes(value.slot, stage))
    lane.peak_bytes = lane.held_bytes
    return lane


def _deadlock(lanes: Sequence[_Lane]) -> ValueError:
    """Where each submesh stands, in the grid of what it runs."""
    rows, marked, waits = [], [], []
    for lane in lanes:
        instructions = lane.list_.instructions
        rows.append(tuple(dict.fromkeys(_tasks(instructions))))
        if not lane.is_done:
            task = next(_tasks(instructions[lane.position :]), None)
            marked += [task] if task else []
            waits.append(f"submesh {lane.list_.submesh} at: {lane.instruction}")
    return ValueError(
        "a schedule lets every submesh go on until its end, but these wait for each "
        "other:\n"
        + "\n".join(waits)
        + f"\n{format_grid(rows, marked)}\n"
        + "Move the marked tasks behind what they wait for."
    )


def _tasks(instructions: Sequence[Instruction]) -> Iterator[Task]:
    return (i.task for i in instructions if isinstance(i, Run))


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
    held = set(step_inputs([list_])[0])
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


def simulate_step(
    program: PipelineProgram,
    schedule: Schedule,
    task_seconds: Callable[[Task], float],
    transfer_seconds: Callable[[Send], float],
    slot_bytes: Callable[[str, int], int],
) -> Simulation:
    """A step of a program, whose slots that live and die together are taken as one.

    A stage has as many parameters and gradients as its layers; joined, a step takes as
    long and holds as much. Arguments are those of `simulate`.
    """
    members = alike_slots(program)

    @cache
    def bytes_(slot: str, stage: int) -> int:
        return sum(slot_bytes(name, stage) for name in members[slot])

    lists = emit(_with_slots(program, members), schedule)
    return simulate(lists, task_seconds, transfer_seconds, bytes_)


def alike_slots(program: PipelineProgram) -> dict[str, tuple[str, ...]]:
    """Slots that are alike, each group by the name of its first.

    They are of one kind and stage, the same programs read and make them, and nobody
    sends them.
    """
    users: dict[str, dict[tuple[int, bool], None]] = {n: {} for n in program.slots}
    for index, body in enumerate(program.programs):
        for is_made, names in ((False, body.inputs), (True, body.outputs)):
            for name in names:
                users[name][index, is_made] = None
    groups: dict[object, list[str]] = {}
    for name, slot in program.slots.items():
        stages = {program.programs[i].stage for i, _ in users[name]}
        is_sent = slot.kind != "batch" and stages - {slot.stage}
        alike = (slot.kind, slot.stage, tuple(users[name]))
        groups.setdefault(name if is_sent else alike, []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def _with_slots(
    program: PipelineProgram, members: Mapping[str, Sequence[str]]
) -> PipelineProgram:
    """The program without code, with one slot for all members of a group."""
    first = {each: name for name, names in members.items() for each in names}

    def joined(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(first[name] for name in names))

    bodies = (
        replace(b, inputs=joined(b.inputs), outputs=joined(b.outputs), donated=())
        for b in program.programs
    )
    slots = {name: program.slots[name] for name in members}
    return replace(program, slots=slots, programs=tuple(bodies))
