"""Pipelines of real programs equal the step on one device, and stop when one fails."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.lowering.programs import PipelineProgram
from autopar.plans.plan import TaskKind
from autopar.runtime.schedule import (
    Schedule,
    Task,
    eager_1f1b,
    gpipe,
    interleaved,
    one_f_one_b,
)
from autopar.runtime.worker import PipelineExecutable
from benchmarks.stage_chain import chain, simulate_schedule
from tests.marks import slow
from tests.runtime.mlp_pipeline import (
    initial_state,
    make_batch,
    microbatches,
    mlp_pipeline,
    single_device_step,
)

P = PartitionSpec


def _slow(*values: Any) -> Any:
    return slow(*values)


def _mesh(first: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), names)


def _layouts() -> dict[str, tuple[list[Mesh], list[PartitionSpec]]]:
    """Meshes and activation specs of the stages."""
    return {
        "2 stages of a device": ([_mesh(i, (1,), ("x",)) for i in (0, 1)], [P()] * 2),
        "2 stages, split otherwise": (
            [_mesh(0, (4,), ("x",)), _mesh(4, (2, 2), ("y", "z"))],
            [P("x"), P("z", "y")],
        ),
        "2 stages of 4 and 2 devices": (
            [_mesh(0, (4,), ("x",)), _mesh(4, (2,), ("y",))],
            [P("x"), P(None, "y")],
        ),
        "4 stages, split in turn": (
            [_mesh(2 * i, (2,), ("x",)) for i in range(4)],
            [P("x"), P(None, "x"), P(), P("x")],
        ),
    }


@cache
def _program(layout: str, num_microbatches: int) -> PipelineProgram:
    return mlp_pipeline(*_layouts()[layout], num_microbatches)


def _check_steps(program: PipelineProgram, schedule: Schedule) -> None:
    """Three steps, each from the state that the one before returned."""
    wanted: Any = initial_state(program.num_stages)
    state: Any = wanted
    step = jax.jit(single_device_step)
    with PipelineExecutable(program, schedule) as executable:
        for seed in range(3):
            batch = make_batch(seed)
            wanted, results = step(wanted, batch)
            state, found = executable(
                state, microbatches(batch, program.num_microbatches)
            )
            np.testing.assert_allclose(found["loss"], results["loss"], rtol=1e-5)
            prediction = np.concatenate(found["prediction"])
            np.testing.assert_allclose(prediction, results["prediction"], atol=1e-5)
            assert state.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_allclose(state[name], array, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "make_schedule"),
    [
        ("2 stages, split otherwise", 4, one_f_one_b),
        ("2 stages of a device", 1, one_f_one_b),
        ("2 stages of 4 and 2 devices", 2, gpipe),
        ("4 stages, split in turn", 2, one_f_one_b),
        _slow("2 stages of a device", 4, one_f_one_b),
        _slow("2 stages of 4 and 2 devices", 4, one_f_one_b),
        _slow("4 stages, split in turn", 4, one_f_one_b),
        _slow("4 stages, split in turn", 4, gpipe),
    ],
)
def test_a_pipeline_equals_the_step_on_one_device(
    layout: str,
    num_microbatches: int,
    make_schedule: Callable[[int, int], Schedule],
) -> None:
    program = _program(layout, num_microbatches)
    _check_steps(program, make_schedule(program.num_stages, num_microbatches))


def test_interleaved_stages_share_their_submesh() -> None:
    meshes, specs = _layouts()["2 stages, split otherwise"]
    specs = [*specs, P(None, "x"), P("y")]
    program = mlp_pipeline([*meshes, *meshes], specs, 2)
    _check_steps(program, interleaved(4, 2, num_submeshes=2))


def test_schedules_give_the_same_bits() -> None:
    states = []
    program = _program("2 stages, split otherwise", 4)
    for make_schedule in (gpipe, one_f_one_b, eager_1f1b):
        with PipelineExecutable(program, make_schedule(2, 4)) as executable:
            batch = microbatches(make_batch(0), 4)
            states.append(executable(initial_state(2), batch)[0])
    first, *others = states
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_donated_state_is_refused_the_second_time() -> None:
    batch = microbatches(make_batch(0), 2)
    program = _program("2 stages of a device", 2)
    with PipelineExecutable(program, gpipe(2, 2)) as executable:
        state, _ = executable(initial_state(2), batch)
        executable(state, batch)
        with pytest.raises(ValueError, match="'scale' was given to a step before"):
            executable(state, batch)
        with pytest.raises(AssertionError, match=r"\['scale'\] of the state"):
            executable({"w0": state["w0"], "w1": state["w1"]}, batch)
        with pytest.raises(AssertionError, match="'x' has 4"):
            executable(initial_state(2), microbatches(make_batch(0), 4))


def _timed_chain(
    num_stages: int, num_microbatches: int, seconds: dict[TaskKind, float]
) -> PipelineProgram:
    """A chain whose tasks only wait: every value is a number on the stage's device."""

    def waiting(stage: int, kind: TaskKind, num_outputs: int) -> Callable[..., Any]:
        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            time.sleep(seconds[kind])
            return [jax.device_put(1.0, jax.devices()[stage])] * num_outputs

        return run

    program = chain(num_stages, num_microbatches)
    meshes = [_mesh(i, (1,), ("x",)) for i in range(num_stages)]
    names = program.slots
    return replace(
        program,
        programs=tuple(
            replace(p, run=waiting(p.stage, p.kind, len(p.outputs)))
            for p in program.programs
        ),
        shardings={
            (n, i): NamedSharding(meshes[i], P())
            for n in names
            for i in range(num_stages)
        },
        zeros={n: lambda: jnp.zeros(()) for n in names if n.startswith("gradient")},
    )


def _inputs(program: PipelineProgram) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    state = {n: 0.0 for n, slot in program.slots.items() if slot.kind == "state"}
    return state, {"batch": [0.0] * program.num_microbatches}


def test_stages_run_at_once_and_in_the_order_of_the_schedule() -> None:
    seconds: dict[TaskKind, float] = {"forward": 0.02, "backward": 0.04, "apply": 0.0}
    schedule = one_f_one_b(4, 16)
    program = _timed_chain(4, 16, seconds)
    with PipelineExecutable(program, schedule) as executable:
        executable.record(*_inputs(program))
        _, _, timeline = executable.record(*_inputs(program))
    for submesh, row in enumerate(schedule.rows):
        ran = (e.task for e in timeline.events if e.submesh == submesh)
        assert tuple(dict.fromkeys(ran)) == row
    busy = [e for e in timeline.events if e.end > e.start + 0.01]
    overlaps = {
        (a.submesh, b.submesh) for a in busy for b in busy if a.start < b.start < a.end
    }
    assert {(0, 1), (1, 2), (2, 3)} <= overlaps
    least = simulate_schedule(schedule, lambda task: seconds[task.kind])
    one_after_another = 4 * 16 * sum(seconds.values())
    assert least.timeline.makespan_seconds <= timeline.makespan_seconds
    assert timeline.makespan_seconds < 0.7 * one_after_another


def _failing(program: PipelineProgram, stage: int, kind: TaskKind) -> PipelineProgram:
    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise ArithmeticError("no number")

    return replace(
        program,
        programs=tuple(
            replace(p, run=fail) if (p.stage, p.kind) == (stage, kind) else p
            for p in program.programs
        ),
    )


@pytest.mark.parametrize("make_schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failing_stage_stops_the_others_and_says_where(
    stage: int, make_schedule: Callable[[int, int], Schedule]
) -> None:
    seconds: dict[TaskKind, float] = {"forward": 0.0, "backward": 0.0, "apply": 0.0}
    program = _failing(_timed_chain(4, 4, seconds), stage, "backward")
    before = set(threading.enumerate())
    with PipelineExecutable(program, make_schedule(4, 4)) as executable:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no number") as caught:
                executable(*_inputs(program))
            task = Task(stage, 0, "backward")
            (note,) = caught.value.__notes__
            assert note.startswith(
                f"raised by stage {stage} in task {task}: run {task}"
            )
        assert len(set(threading.enumerate()) - before) == 4
    assert set(threading.enumerate()) <= before


def test_threads_live_from_step_to_step_and_end_with_the_executable() -> None:
    seconds: dict[TaskKind, float] = {"forward": 0.0, "backward": 0.0, "apply": 0.0}
    program = _timed_chain(2, 2, seconds)
    before = set(threading.enumerate())
    executable = PipelineExecutable(program, gpipe(2, 2))
    executable(*_inputs(program))
    threads = set(threading.enumerate()) - before
    executable(*_inputs(program))
    assert set(threading.enumerate()) - before == threads
    assert len(threads) == 2
    del executable
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_what_cannot_run_is_refused_before_a_thread_starts() -> None:
    before = set(threading.enumerate())
    rows = tuple(
        tuple(map(Task.parse, text.split()))
        for text in ("0F0 0B0 0F1 0B1 0A", "1F0 1F1 1B0 1B1 1A")
    )
    with pytest.raises(ValueError, match=">0B0<"):
        PipelineExecutable(chain(2, 2), Schedule("by hand", 2, 2, rows))
    assert set(threading.enumerate()) <= before


def test_many_steps_in_a_row_do_not_pile_up() -> None:
    batch = microbatches(make_batch(0), 4)
    state: Any = initial_state(2)
    program = _program("2 stages, split otherwise", 4)
    with PipelineExecutable(program, one_f_one_b(2, 4)) as executable:
        for _ in range(20):
            state, _ = executable(state, batch)
        jax.block_until_ready(state)
