"""Instruction lists hold what the dataflow needs."""

from dataclasses import replace
from typing import Any

import pytest

from autopar.lowering.programs import PipelineProgram, Slot, StageProgram
from autopar.runtime.emit import emit
from autopar.runtime.instructions import (
    Free,
    Receive,
    Send,
    Value,
    made_and_used,
)
from autopar.runtime.schedule import (
    Schedule,
    Task,
    gpipe,
    interleaved,
    one_f_one_b,
)
from benchmarks.stage_chain import chain


def test_the_middle_of_three_stages() -> None:
    _, middle, _ = emit(chain(3, 1), one_f_one_b(3, 1))
    assert str(middle).splitlines() == [
        "autopar instructions 1, submesh 1",
        'receive "output 0"@0 from 0 to 1',
        'run 1F0 program 3: "state 1" "output 0"@0 -> "output 1"@0 "residual 1"@0',
        'free "output 0"@0 on 1',
        'send "output 1"@0 from 1 to 2',
        'free "output 1"@0 on 1',
        'receive "cotangent 2"@0 from 2 to 1',
        'zero "gradient 1" on 1',
        'run 1B0 program 4: "residual 1"@0 "cotangent 2"@0 "gradient 1" -> '
        '"cotangent 1"@0 "gradient 1"',
        'free "cotangent 2"@0 on 1',
        'free "residual 1"@0 on 1',
        'send "cotangent 1"@0 from 1 to 0',
        'free "cotangent 1"@0 on 1',
        'run 1A program 5: "state 1" "gradient 1" -> "state 1"',
        'free "gradient 1" on 1',
    ]


SCHEDULES = [gpipe(4, 8), one_f_one_b(4, 8), interleaved(8, 8, 4)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_gpi_2_one_send_a_microbatch_boundary_and_direction(schedule: Schedule) -> None:
    lists = emit(chain(schedule.num_stages, 8), schedule)
    moves = [i for list_ in lists for i in list_.instructions]
    sends = [(i.source, i.target) for i in moves if isinstance(i, Send)]
    for stage in range(schedule.num_stages - 1):
        assert sends.count((stage, stage + 1)) == 8
        assert sends.count((stage + 1, stage)) == 8
    assert len(sends) == 2 * 8 * (schedule.num_stages - 1)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_only_state_is_left_and_a_pair_receives_in_the_order_sent(
    schedule: Schedule,
) -> None:
    lists = emit(chain(schedule.num_stages, 8), schedule)
    sent: dict[tuple[int, int], list[Value]] = {}
    received: dict[tuple[int, int], list[Value]] = {}
    for list_ in lists:
        held = set()
        for instruction in list_.instructions:
            made, used = made_and_used(instruction)
            held |= {*made, *used}
            if isinstance(instruction, Free):
                held.remove((instruction.stage, instruction.value))
            if isinstance(instruction, Send):
                pair = (instruction.source, instruction.target)
                sent.setdefault(pair, []).append(instruction.value)
            if isinstance(instruction, Receive):
                pair = (instruction.source, instruction.target)
                received.setdefault(pair, []).append(instruction.value)
        assert all(value.slot.startswith("state") for _, value in held)
    assert sent == received


def _with_body(program: PipelineProgram, index: int, **changes: Any) -> PipelineProgram:
    bodies = list(program.programs)
    bodies[index] = replace(bodies[index], **changes)  # type: ignore[arg-type]
    return replace(program, programs=tuple(bodies))


def test_state_goes_to_its_readers_once_a_step() -> None:
    program = _with_body(chain(2, 4), 3, inputs=("state 0", "output 0"))
    first, second = emit(program, one_f_one_b(2, 4))
    assert str(first.instructions[0]) == 'send "state 0" from 0 to 1'
    receives = [i for i in second.instructions if isinstance(i, Receive)]
    assert [i.value.slot for i in receives].count("state 0") == 1
    assert str(second.instructions[-1]) != 'free "state 0" on 1'


def _emit_with(index: int, **changes: Any) -> None:
    emit(_with_body(chain(2, 2), index, **changes), gpipe(2, 2))


def test_a_program_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(AssertionError, match="names 'nothing'"):
        _emit_with(0, inputs=("nothing",))
    with pytest.raises(ValueError, match='reads the activation slot "output 1"@0 of'):
        _emit_with(3, outputs=("residual 1",))
    tasks = Task(0, 0, "backward"), Task(0, 0, "forward")
    with pytest.raises(ValueError, match="makes it later; move 0B0 behind 0F0"):
        emit(chain(1, 1), Schedule("by hand", 1, 1, (tasks,)))
    with pytest.raises(AssertionError, match='the activation slot "output 1"'):
        _emit_with(0, outputs=("output 1",))
    with pytest.raises(AssertionError, match='make "output 0"'):
        _emit_with(1, outputs=("output 0", "gradient 0"))
    with pytest.raises(AssertionError, match="reads 'output 0' of a microbatch"):
        _emit_with(2, inputs=("state 0", "output 0"))
    with pytest.raises(AssertionError, match='donates "state 0", which is'):
        _emit_with(0, donated=(0,))
    with pytest.raises(AssertionError, match=r"has \(2, 4\) and not \(2, 2\)"):
        emit(chain(2, 2), gpipe(2, 4))


def test_updated_state_is_not_read() -> None:
    program = chain(1, 1)
    again = StageProgram(0, "apply", ("state 0",), ("norm",), program.programs[0].run)
    program = replace(
        program,
        slots={**program.slots, "norm": Slot("norm", "result", 0)},
        programs=(*program.programs, again),
    )
    with pytest.raises(AssertionError, match='reads "state 0" as it was before'):
        emit(program, gpipe(1, 1))
    unmade = replace(program, programs=program.programs[:-1])
    with pytest.raises(ValueError, match="no scheduled program makes 'norm'"):
        emit(unmade, gpipe(1, 1))
