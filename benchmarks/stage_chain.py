"""Stages in a plain chain: their dataflow without code, and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.lowering.programs import PipelineProgram, Slot, StageProgram
from autopar.plans.plan import TaskKind
from autopar.runtime.emit import emit
from autopar.runtime.instructions import Send
from autopar.runtime.schedule import Schedule, Task
from autopar.runtime.simulate import Simulation, simulate


def simulate_schedule(
    schedule: Schedule,
    task_seconds: Callable[[Task], float],
    transfer_seconds: Callable[[Send], float] = lambda _: 0.0,
) -> Simulation:
    """A schedule of stages in a plain chain: forward up, backward down, then apply."""
    sizes = schedule.num_stages, schedule.num_microbatches
    return simulate(
        emit(chain(*sizes, schedule.has_weight_tasks), schedule),
        task_seconds,
        transfer_seconds,
    )


def chain(
    num_stages: int, num_microbatches: int, has_weight_tasks: bool = False
) -> PipelineProgram:
    """The dataflow of stages in a chain, without code: to simulate, not to run.

    Stage i makes `output i` of `output i-1` (of `batch`) and keeps `residual i`;
    backward makes `cotangent i` for stage i-1 and adds to `gradient i`, which the
    weight task does instead, with what backward `kept i`, if there is one.
    """
    slots: list[Slot] = [Slot("batch", "batch", 0)]
    programs: list[StageProgram] = []
    for i in range(num_stages):
        is_last = i == num_stages - 1
        slots += [
            Slot(f"state {i}", "state", i),
            Slot(f"output {i}", "activation", i),
            Slot(f"residual {i}", "activation", i),
            Slot(f"cotangent {i}", "activation", i),
            Slot(f"gradient {i}", "gradient", i),
        ]
        below = f"output {i - 1}" if i else "batch"
        above = f"output {i}" if is_last else f"cotangent {i + 1}"
        state, gradient = f"state {i}", f"gradient {i}"
        down = (f"cotangent {i}",) if i else ()
        programs += [
            _body(i, "forward", (state, below), (f"output {i}", f"residual {i}")),
        ]
        residual = f"residual {i}"
        if has_weight_tasks:
            slots.append(Slot(f"kept {i}", "activation", i))
            programs += [
                _body(i, "backward", (residual, above), (*down, f"kept {i}")),
                _body(i, "weight", (residual, f"kept {i}", gradient), (gradient,)),
            ]
        else:
            programs.append(
                _body(i, "backward", (residual, above, gradient), (*down, gradient))
            )
        programs.append(_body(i, "apply", (state, gradient), (state,)))
    return PipelineProgram(
        num_stages,
        num_microbatches,
        {slot.name: slot for slot in slots},
        tuple(programs),
        shardings={},
        zeros={},
    )


def _body(
    stage: int, kind: TaskKind, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> StageProgram:
    return StageProgram(stage, kind, inputs, outputs, run=_refuse_to_run)


def _refuse_to_run(_: Sequence[object]) -> list[object]:
    raise AssertionError("a chain has no code: it is simulated, never run")
