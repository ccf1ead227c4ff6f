"""How much longer a pipeline takes than its schedule says, in stages that only wait.

A task of stage i waits on the host for a given time and hands small arrays on, from
one virtual device to the next; so all that is measured is
instructions, threads, queues and transfers. The theoretical time is what the papers of
the schedules say; "simulate x" is that of our simulator, with free transfers, as a
ratio to it. The first step warms up; the best and the median of the others are ratios
to the theory, too.

    python -m benchmarks.pipeline_overhead --seconds 0.1 --steps 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.lowering.programs import PipelineProgram
    from autopar.plans.plan import TaskKind
    from autopar.runtime.schedule import Schedule

NUM_MICROBATCHES = 16


@dataclass(frozen=True)
class Measurement:
    """One schedule: seconds of a step in theory, simulated, and of each step run."""

    schedule: str
    num_stages: int
    theory_seconds: float
    simulated_seconds: float
    step_seconds: tuple[float, ...]

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.step_seconds) / self.theory_seconds

    @property
    def simulated_ratio(self) -> float:
        return self.simulated_seconds / self.theory_seconds

    @property
    def best_ratio(self) -> float:
        return min(self.step_seconds) / self.theory_seconds


def theoretical_seconds(schedule: Schedule, seconds: float) -> float:
    """The makespan of p submeshes with v stages each and m microbatches.

    GPipe and 1F1B of all kinds (Narayanan et al. 2021, section 2.2): 3 (v m + p - 1)
    waits, as backward takes two; ZB-H1 and ZB-H2 (Qi et al. 2023): 3 m + p - 1, those
    of a stage having no bubble inside.
    """
    num_submeshes = len(schedule.rows)
    stages_each = schedule.num_stages // num_submeshes
    fill = (num_submeshes - 1) * (1 if schedule.has_weight_tasks else 3)
    return seconds * (3 * stages_each * schedule.num_microbatches + fill)


def measure(schedule: Schedule, seconds: float, steps: int) -> Measurement:
    """Forward waits `seconds`, backward twice as long, apply not at all.

    Where weights have tasks of their own, they take half of backward's wait.
    """
    import jax

    from autopar.runtime.worker import PipelineExecutable
    from benchmarks.stage_chain import simulate_schedule

    costs: dict[TaskKind, float] = {
        "forward": seconds,
        "backward": seconds if schedule.has_weight_tasks else 2 * seconds,
        "weight": seconds,
        "apply": 0.0,
    }
    simulated = simulate_schedule(schedule, lambda task: costs[task.kind])
    program = _waiting(schedule, costs)
    state = {n: 0.0 for n, slot in program.slots.items() if slot.kind == "state"}
    batch = {"batch": [0.0] * schedule.num_microbatches}
    times = []
    with PipelineExecutable(program, schedule) as executable:
        for _ in range(steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(executable(state, batch))
            times.append(time.perf_counter() - start)
    return Measurement(
        schedule.name,
        schedule.num_stages,
        theoretical_seconds(schedule, seconds),
        simulated.timeline.makespan_seconds,
        tuple(times[1:]),
    )


def _waiting(schedule: Schedule, costs: dict[TaskKind, float]) -> PipelineProgram:
    """A chain of stages, one virtual device each, that pass 4 KiB arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.stage_chain import chain

    sizes = schedule.num_stages, schedule.num_microbatches
    program = chain(*sizes, schedule.has_weight_tasks)
    homes = []
    for stage in range(schedule.num_stages):
        device = jax.devices()[schedule.submesh_by_stage[stage]]
        homes.append(NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec()))

    def waiting(stage: int, seconds: float, number: int) -> Callable[..., Any]:
        zeros = lambda: [jnp.zeros(1024)] * number  # noqa: E731
        make = jax.jit(zeros, out_shardings=homes[stage])

        def run(_: Sequence[Any]) -> Sequence[Any]:
            time.sleep(seconds)
            return make()

        return run

    return replace(
        program,
        programs=tuple(
            replace(p, run=waiting(p.stage, costs[p.kind], len(p.outputs)))
            for p in program.programs
        ),
        shardings={(n, i): home for n in program.slots for i, home in enumerate(homes)},
        zeros={n: lambda: jnp.zeros(1024) for n in program.slots},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a forward")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    from autopar.runtime.schedule import (
        eager_1f1b,
        gpipe,
        interleaved,
        one_f_one_b,
        zero_bubble_h1,
        zero_bubble_h2,
    )

    print(f"{NUM_MICROBATCHES} microbatches, waits of {arguments.seconds} s")
    columns = "theory s", "simulate x", "median s", "median x", "best x"
    print(f"{'schedule':>15} stages" + "".join(f"{name:>12}" for name in columns))
    schedules = [
        gpipe(4, NUM_MICROBATCHES),
        one_f_one_b(4, NUM_MICROBATCHES),
        one_f_one_b(8, NUM_MICROBATCHES),
        eager_1f1b(4, NUM_MICROBATCHES),
        interleaved(8, NUM_MICROBATCHES, num_submeshes=4),
        zero_bubble_h1(4, NUM_MICROBATCHES),
        zero_bubble_h2(4, NUM_MICROBATCHES),
    ]
    for schedule in schedules:
        found = measure(schedule, arguments.seconds, arguments.steps)
        numbers = (
            found.theory_seconds,
            found.simulated_ratio,
            statistics.median(found.step_seconds),
            found.median_ratio,
            found.best_ratio,
        )
        line = "".join(f"{number:12.3f}" for number in numbers)
        print(f"{found.schedule:>15} {found.num_stages:6d}{line}", flush=True)


if __name__ == "__main__":
    main()
