"""Suites that run: steps beside jit, pipelines beside theory, steps on Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.request import Case, Request
from benchmarks.results import Result

if TYPE_CHECKING:
    from autopar.runtime.schedule import Schedule
    from benchmarks.call_time import CallTime
    from benchmarks.ray_step import Measurement

RAY_SECONDS = 300.0  # until the steps on Ray are given up
_GRACE_SECONDS = 20.0
_CALL_DEVICES = 8  # those of call_time.MESH
_ROOT = Path(__file__).parents[1]


def step_suite(request: Request) -> Iterator[Case]:
    """Real steps beside jit with the same shardings, taken in turns; and calls.

    Autopar's result has its time over that of the user's own step, annotated, and of
    the step as it was planned (`benchmarks/step_time.py`).

    First calls, in processes of their own, are left out of small runs; calls of any
    kind where steps are named.
    """
    from benchmarks.call_time import measure_calls, measure_first_call

    rounds = request.rounds or (5 if request.small else 20)
    chosen = request.first()
    for name, mesh in chosen.cases():
        case = f"{name} {mesh}"
        given = chosen, name, mesh, rounds
        yield Case(case, lambda given=given: _steps(*given))
    is_own = bool(request.targets) or request.num_devices != _CALL_DEVICES
    if is_own or not request.is_timed:
        return
    yield Case("calls", lambda: [_call(measure_calls(10 * rounds))])
    if not request.small:
        times = -(-rounds // 7)
        yield Case("first calls", lambda: [_call(measure_first_call(times))])


def _steps(request: Request, name: str, mesh: str, rounds: int) -> Iterator[Result]:
    from benchmarks.step_time import measure

    for each in measure(request.find(name), mesh, rounds):
        values: dict[str, float] = {
            "collective_bytes": each.collective_bytes,
            "temp_bytes": each.temp_bytes,
        }
        timed = {
            "median_seconds": each.median_seconds,
            "spread": each.spread,
            "compile_seconds": each.compile_seconds,
        }
        for baseline, ratio in each.times.items():
            timed[f"times_{baseline.replace(' ', '_')}"] = ratio
        yield Result("step", f"{name} {mesh} {each.program}", values, timed)


def _call(found: CallTime) -> Result:
    timed = {"median_seconds": found.our_seconds, "times_jit": found.ratio}
    return Result("step", found.case, timed=timed)


def pipeline_suite(request: Request) -> Iterator[Case]:
    """How much longer pipelines take than their schedules say."""
    from autopar.runtime.schedule import interleaved, one_f_one_b, zero_bubble_h1
    from benchmarks.pipeline_overhead import NUM_MICROBATCHES

    schedules = [one_f_one_b(4, NUM_MICROBATCHES)]
    if not request.small:
        schedules.append(interleaved(8, NUM_MICROBATCHES, num_submeshes=4))
        schedules.append(zero_bubble_h1(4, NUM_MICROBATCHES))
    for schedule in schedules:
        case = f"{schedule.name} {schedule.num_stages} stages"
        given = request, schedule, case
        yield Case(case, lambda given=given: [_pipeline(*given)])


def _pipeline(request: Request, schedule: Schedule, case: str) -> Result:
    from benchmarks.pipeline_overhead import measure

    seconds, steps = (0.02, 2) if request.small else (0.1, 3)
    found = measure(schedule, seconds, request.rounds or steps)
    values = {
        "theory_seconds": found.theory_seconds,
        "simulated_seconds": found.simulated_seconds,
    }
    timed = {"times_theory": found.best_ratio, "median_times": found.median_ratio}
    return Result("pipeline", case, values, timed)


def ray_suite(request: Request) -> Iterator[Case]:
    """Steps on two virtual hosts of a local Ray cluster, beside one process.

    In a process of its own: Ray forks, which one that has run JAX should not.
    """
    from benchmarks.ray_step import DEVICES, HOSTS

    for name in request.targets or ("mlp",):
        case = f"{name} {HOSTS} hosts of {DEVICES}"
        given = request, name, case
        yield Case(case, lambda given=given: [_on_ray(*given)])


def _on_ray(request: Request, name: str, case: str) -> Result:
    from benchmarks.ray_step import planned_bytes

    if not request.is_timed:
        return Result("ray", case, {**planned_bytes(request.find(name))})
    found = _ray_measurement(request, name)
    values: Mapping[str, float] = {
        "collective_bytes": found.collective_bytes,
        "peak_bytes": found.peak_bytes,
    }
    timed = {
        "first_call_seconds": found.first_call_seconds,
        "median_seconds": found.ray_seconds,
        "times_one_process": found.ray_seconds / found.local_seconds,
    }
    return Result("ray", case, {**values}, timed)


def _ray_measurement(request: Request, name: str) -> Measurement:
    """What a new process prints.

    Raises:
      RuntimeError: it failed, or had not ended after `RAY_SECONDS`.
    """
    from benchmarks.ray_step import Measurement

    rounds = request.rounds or (5 if request.small else 20)
    command = ["-m", "benchmarks.ray_step", "--json", f"--model={name}"]
    if request.args is not None:
        command.append(f"--args={request.args}")
    command += [f"--set={key}={value!r}" for key, value in request.settings.items()]
    with subprocess.Popen(
        [sys.executable, *command, f"--rounds={rounds}"],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, told = process.communicate(timeout=RAY_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process)
            raise RuntimeError(
                f"The steps on Ray must end within {RAY_SECONDS:g} s, but were still "
                f"running; run python {' '.join(command)} to see what they wait for."
            ) from None
        except BaseException:  # a key pressed: its Ray cluster ends with it
            _end(process)
            raise
    lines = printed.splitlines()
    if process.returncode or not lines:
        why = (told.splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"The steps on Ray must succeed, but failed: {why}")
    return Measurement(**json.loads(lines[-1]))


def _environment() -> dict[str, str]:
    """Also finds the checkout: the folder stays the user's, for a step of his own."""
    paths: Iterable[str] = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a process; on SIGTERM it ends its Ray cluster too."""
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
