"""Recovery of trainings on a local Ray cluster whose workers are killed or stopped.

The state lives on the workers alone. A fault is set for every phase in turn, at a
random host and moment of it; what the training gives is compared with the steps of
`jax.jit` on one device, step by step.

    python -m benchmarks.faults --faults 20
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("plan", "compile", "forward", "backward", "transfer", "apply", "save")
_POINT = {"compile": "load"}  # where a worker meets the fault of a phase, if not so
_DELAY_SECONDS = 0.01  # the most between such a point and the fault
_PLAN_SECONDS = 0.5
_EVERY = 4  # a fault each so many steps, and a checkpoint each half as many
_NUM_STAGES = 2
_BATCH = 64


@dataclass(frozen=True)
class Fault:
    """What is done to a worker: in which phase of which step, and by which signal."""

    phase: str
    at_step: int
    rank: int
    signal: signal.Signals
    delay_seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a training lived through one fault; seconds from the signal on, then."""

    fault: Fault
    detect_seconds: float
    recover_seconds: float
    error: str

    @property
    def is_named(self) -> bool:
        """Whether the host that was lost is the first one that the error names."""
        named = re.search(r"host (\d+)", self.error)
        return named is not None and int(named[1]) == self.fault.rank

    def __str__(self) -> str:
        fault = self.fault
        return (
            f"{fault.phase:>9} step {fault.at_step:3} host {fault.rank} "
            f"{fault.signal.name}: told after {self.detect_seconds:5.1f} s, back after "
            f"{self.recover_seconds:5.1f} s more ({self.error[:100]})"
        )


@dataclass(frozen=True)
class Result:
    """All faults of a run; a loss is wrong if it is not that of one device (1e-5)."""

    faults: tuple[Fault, ...]
    outcomes: tuple[Outcome, ...]
    num_steps: int
    losses: int
    wrong_losses: int

    def __str__(self) -> str:
        lines = [str(outcome) for outcome in self.outcomes]
        for name in ("detect", "recover"):
            seconds = [getattr(each, f"{name}_seconds") for each in self.outcomes]
            if seconds:
                lines.append(
                    f"seconds to {name}: median {statistics.median(seconds):.1f}, "
                    f"largest {max(seconds):.1f}"
                )
        named = sum(outcome.is_named for outcome in self.outcomes)
        lines.append(f"{named} of {len(self.outcomes)} errors name the lost host")
        lines.append(
            f"{len(self.outcomes)} recoveries of {len(self.faults)} faults, "
            f"{self.wrong_losses} wrong of {self.losses} losses of {self.num_steps} "
            f"steps"
        )
        return "\n".join(lines)


class FaultyBatches:
    """Batches by the number of their step; sets the fault of a step before it.

    Steps that are to meet a fault while they are planned or compiled get a batch of
    another size, which is planned and compiled anew.
    """

    def __init__(self, position: int | None, faults: FaultInjection) -> None:
        self.position, self._faults = position or 0, faults

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._faults.batch(self.position)
        self._faults.begin(self.position)
        self.position += 1
        return batch


class FaultInjection:
    """The faults of a training, each set once."""

    def __init__(self, faults: tuple[Fault, ...], workload: Any, note: Path) -> None:
        self._by_step = {fault.at_step: fault for fault in faults}
        self._workload, self._note = workload, note
        self._sizes = {
            fault.at_step: _BATCH - 8 * (i + 1)
            for i, fault in enumerate(
                fault for fault in faults if fault.phase in ("plan", "compile")
            )
        }
        self.workers: Any = None  # a function; there are none before the first step
        self.current: Fault | None = None

    @staticmethod
    def of_none(workload: Any) -> FaultInjection:
        """No fault is set."""
        return FaultInjection((), workload, Path())

    def batch(self, number: int) -> Any:
        """The batch of a step."""
        import jax

        batch, size = self._workload.make_batch(number), self._sizes.get(number)
        return jax.tree.map(lambda x: x[:size], batch)

    def begin(self, number: int) -> None:
        """Set the fault of a step, if it has one that was not set before."""
        fault = self._by_step.pop(number, None)
        if fault is None:
            return
        self.current, workers = fault, self.workers()
        if fault.phase == "plan":
            target = workers.facts[fault.rank].process_id, fault
            threading.Thread(target=self._kill, args=target).start()
            return
        import ray
        from ray import cloudpickle

        point = _POINT.get(fault.phase, fault.phase)
        given = point, fault.signal, fault.delay_seconds, str(self._note)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        call = workers._actors[fault.rank].__ray_call__
        ray.get(call.remote(set_trap, *given))

    def _kill(self, process_id: int, fault: Fault) -> None:
        time.sleep(fault.delay_seconds)
        self._note.write_text(str(time.time()))
        os.kill(process_id, fault.signal)

    def signalled(self) -> float:
        """When the last fault was met, in seconds since the epoch."""
        return float(self._note.read_text())


def set_trap(
    _: Any, point: str, signal_: signal.Signals, delay_seconds: float, note: str
) -> None:
    """Has this worker meet a fault, once, some seconds after it gets to a point.

    Points are "load", "save", "transfer", and the kinds of tasks: "forward",
    "backward", "apply". The time of the signal, in seconds since the epoch, is written
    to `note` before.
    """
    from autopar.runtime import ray_worker, worker
    from autopar.runtime.instructions import Receive, Run, Send

    is_met = threading.Event()

    def send() -> None:
        Path(note).write_text(str(time.time()))
        os.kill(os.getpid(), signal_)

    def meet(found: str) -> None:
        if found == point and not is_met.is_set():
            is_met.set()
            threading.Timer(delay_seconds, send).start()

    def set_at(owner: Any, name: str, point_of: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def met(*given: Any) -> Any:
            meet(point_of(*given))
            return call(*given)

        setattr(owner, name, met)

    def point_of_task(_: Any, instruction: Any) -> str:
        if isinstance(instruction, Send | Receive):
            return "transfer"
        return instruction.task.kind if isinstance(instruction, Run) else ""

    set_at(ray_worker, "load_job", lambda _: "load")
    set_at(ray_worker, "write_tile", lambda *_: "save")
    set_at(worker.Lane, "_execute", point_of_task)


def draw_faults(number: int, seed: int, hung_every: int, num_hosts: int) -> Any:
    """Faults of all phases in turn; every so many stop a worker instead of killing it.

    With `hung_every` 0 none does.
    """
    chance = random.Random(seed)
    phases = [PHASES[i % len(PHASES)] for i in range(number)]
    chance.shuffle(phases)
    return tuple(
        Fault(
            phase,
            _EVERY * (i + 1) + (1 if phase == "save" else chance.randrange(2)),
            chance.randrange(num_hosts),
            signal.SIGSTOP
            if hung_every and i % hung_every == hung_every - 1
            else signal.SIGKILL,
            chance.uniform(0, _PLAN_SECONDS if phase == "plan" else _DELAY_SECONDS),
        )
        for i, phase in enumerate(phases)
    )


def measure(
    address: str, faults: tuple[Fault, ...], *, is_pipeline: bool = True
) -> Result:
    """Train on two hosts of a cluster through all faults.

    Raises:
      HostLostError: a training did not go on.
    """
    import jax

    import autopar
    from autopar.runtime.ray_workers import workers_of

    from .models import build

    workload = build("mlp")
    cluster = autopar.Cluster.ray(address, num_hosts=2)
    method: Any = autopar.ShardParallel()
    if is_pipeline:
        method = autopar.PipelineParallel(num_stages=_NUM_STAGES, num_microbatches=2)
    step = autopar.parallelize(workload.step, method=method, cluster=cluster)
    num_steps = max(fault.at_step for fault in faults) + _EVERY
    with tempfile.TemporaryDirectory() as folder:
        injection = FaultInjection(faults, workload, Path(folder) / "note")
        groups = (1,) * _NUM_STAGES if is_pipeline else (2,)
        injection.workers = lambda: workers_of(cluster, groups)
        expected = _losses_of_one_device(workload, injection, num_steps)
        outcomes: list[Outcome] = []
        losses = wrong = 0
        with autopar.Checkpoints(Path(folder) / "run") as checkpoints:
            training = autopar.Training(
                *(step, checkpoints, workload.init, jax.random.key(0)),
                batches=lambda position: FaultyBatches(position, injection),
                save_every=_EVERY // 2,
            )
            for number, metrics in training.run(num_steps):
                loss, losses = float(metrics["loss"]), losses + 1
                wrong += abs(loss - expected[number]) > 1e-5 * max(1, abs(loss))
                for recovery in training.recoveries[len(outcomes) :]:
                    assert injection.current is not None, "a fault that nobody set"
                    error_at = time.time() - recovery.seconds
                    found = Outcome(
                        injection.current,
                        error_at - injection.signalled(),
                        recovery.seconds,
                        recovery.error,
                    )
                    outcomes.append(found)
                    print(found, flush=True)
        training.step.close()
    return Result(faults, tuple(outcomes), num_steps, losses, wrong)


def _losses_of_one_device(
    workload: Any, injection: FaultInjection, num_steps: int
) -> list[float]:
    import jax

    step, losses = jax.jit(workload.step), []
    state = workload.init(jax.random.key(0))
    for number in range(num_steps):
        state, metrics = step(state, injection.batch(number))
        losses.append(float(metrics["loss"]))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hung-every", type=int, default=4, help="0: none hangs")
    parser.add_argument("--one-program", action="store_true", help="no pipeline")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices
    from autopar.runtime.ray_local import local_ray_hosts

    use_virtual_devices(8)
    faults = draw_faults(arguments.faults, arguments.seed, arguments.hung_every, 2)
    if arguments.one_program:  # all that one program does is one task
        faults = tuple(
            fault for fault in faults if fault.phase in PHASES[:2] + PHASES[-2:]
        )
    with local_ray_hosts(2, 4) as hosts:
        print(measure(hosts.address, faults, is_pipeline=not arguments.one_program))


if __name__ == "__main__":
    main()
