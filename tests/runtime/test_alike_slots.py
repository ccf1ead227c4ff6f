"""Slots that are joined change nothing of a simulated step."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.lowering.programs import PipelineProgram, Slot
from autopar.runtime.emit import emit
from autopar.runtime.schedule import (
    Schedule,
    eager_1f1b,
    gpipe,
    interleaved,
    zero_bubble_h1,
)
from autopar.runtime.simulate import alike_slots, simulate, simulate_step
from benchmarks.stage_chain import chain, has_weight_tasks

TIMES = 5


def layered(schedule: Schedule) -> PipelineProgram:
    """A chain whose stages have several values where `chain` has one."""
    sizes = schedule.num_stages, schedule.num_microbatches
    program = chain(*sizes, has_weight_tasks(schedule))

    def several(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name} of {i}" for name in names for i in range(TIMES))

    slots = [
        Slot(f"{slot.name} of {i}", slot.kind, slot.stage)
        for slot in program.slots.values()
        for i in range(TIMES)
    ]
    bodies = (
        replace(b, inputs=several(b.inputs), outputs=several(b.outputs))
        for b in program.programs
    )
    return replace(
        program, slots={slot.name: slot for slot in slots}, programs=tuple(bodies)
    )


def interleaved_chain(num_stages: int, num_microbatches: int) -> Schedule:
    return interleaved(num_stages, num_microbatches, num_stages // 2)


@pytest.mark.parametrize("make", [eager_1f1b, gpipe, zero_bubble_h1, interleaved_chain])
def test_time_and_memory_stay_to_the_byte(make: Callable[[int, int], Schedule]) -> None:
    schedule = make(4, 6)
    program = layered(schedule)
    members = alike_slots(program)
    assert len(members) < len(program.slots) / 2
    assert sum(map(len, members.values())) == len(program.slots)
    crossing = {slot for slot in program.slots if slot.startswith("cotangent")}
    assert crossing - {f"cotangent 0 of {i}" for i in range(TIMES)} < {*members}

    def slot_bytes(slot: str, stage: int) -> int:
        return 100 * stage + sum(map(ord, slot)) % 97

    seconds = {"forward": 1.0, "backward": 1.5, "weight": 0.7, "apply": 0.2}
    costs = lambda t: seconds[t.kind], lambda _: 0.3, slot_bytes  # noqa: E731
    expected = simulate(emit(program, schedule), *costs)
    assert simulate_step(program, schedule, *costs) == expected
