"""The suites of `autopar bench`: each yields results, small ones in seconds.

Suites run in this process on virtual devices, except `ray`, whose driver and hosts are
processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.models import build, names
from benchmarks.models.names import look_up
from benchmarks.results import FAILED, Result

if TYPE_CHECKING:
    from autopar.plans.parallel_plan import Plan
    from benchmarks.ray_step import Measurement

TABLES = Path(__file__).parent / "published"
RAY_SECONDS = 300.0  # until the steps on Ray are given up
_GRACE_SECONDS = 20.0
_TINY = ("mlp", "gpt", "moe")
_MODELS = ("mlp", "gpt", "llama", "bert", "t5", "moe", "vit", "resnet", "unet")
_MESHES = ("x:8", "x:2;y:4")


@dataclass(frozen=True)
class Request:
    """What the command line asks of a suite; None is the suite's own choice.

    What only a clock tells is left out unless `is_timed`: calls, and a Ray cluster, for
    which steps are planned only.

    Raises:
      ValueError: an unknown model, with the nearest name.
    """

    small: bool = False
    models: tuple[str, ...] | None = None
    meshes: tuple[str, ...] | None = None
    cluster: str | None = None
    tables: tuple[Path, ...] = ()
    rounds: int | None = None
    is_timed: bool = True

    def __post_init__(self) -> None:
        known = {name: name for name in names()}
        for name in self.models or ():
            look_up("model", name, known)

    def cases(self) -> Iterator[tuple[str, str]]:
        """Model and mesh of each case."""
        models = self.models or (_TINY if self.small else _MODELS)
        meshes = self.meshes or (_MESHES[:1] if self.small else _MESHES)
        for model in models:
            for mesh in meshes:
                yield model, mesh


def plan_suite(request: Request) -> Iterator[Result]:
    """Time to plan, gap, and what is planned, on virtual devices or a preset."""
    import autopar
    from autopar.clusters.cluster import Cluster

    cluster = None if request.cluster is None else Cluster.preset(request.cluster)
    cases = list(request.cases())
    if cluster is not None and request.meshes is None:
        cases = [(model, "") for model in dict.fromkeys(model for model, _ in cases)]
    for model, mesh in cases:
        workload = build(model)
        step = autopar.parallelize(workload.step, mesh=mesh or None, cluster=cluster)
        start = perf_counter()
        plan = step.plan(*workload.abstract())
        seconds = perf_counter() - start
        case = f"{model} {mesh or request.cluster}"
        yield Result("plan", case, _planned(plan), {"plan_seconds": seconds})


def _planned(plan: Plan) -> dict[str, float]:
    predicted = plan.predicted
    return {
        "modelled_seconds": predicted.step_seconds,
        "collective_bytes": predicted.collective_bytes,
        "peak_bytes": predicted.peak_bytes,
        "gap": predicted.optimality_gap,
    }


def quality_suite(request: Request) -> Iterator[Result]:
    """The solver beside every named method: modelled, lowered and compiled."""
    import autopar

    methods: Mapping[str, Any] = {
        "solver": None,
        "data parallel": autopar.DataParallel(),
        **{f"ZeRO-{stage}": autopar.Zero(stage=stage) for stage in (1, 2, 3)},
        "Megatron": autopar.Megatron(tensor=4),
        "Megatron sequence": autopar.Megatron(tensor=4, sequence=True),
    }
    small = request.small and request.models is None
    chosen = replace(request, models=("mlp",)) if small else request
    for model, mesh in chosen.cases():
        for name, method in methods.items():
            own = "data:2;tensor:4" if name.startswith("Megatron") else mesh
            case = f"{model} {own} {name}"
            workload = build(model)
            step = autopar.parallelize(workload.step, mesh=own, method=method)
            start = perf_counter()
            try:
                compiled = step.lower(*workload.abstract()).compile()
            except (ValueError, NotImplementedError) as error:
                yield Result("quality", case, note=str(error).split(";")[0])
                continue
            seconds = perf_counter() - start
            yield Result("quality", case, _audited(compiled), {"seconds": seconds})


def _audited(compiled: Any) -> dict[str, float]:
    audit = compiled.audit()
    audit.raise_if_wrong()
    found = {
        **_planned(compiled.plan),
        "lowered_bytes": sum(row.lowered_bytes for row in audit.rows),
        "compiled_bytes": sum(row.compiled_bytes or 0 for row in audit.rows),
    }
    if audit.memory is not None:
        found["compiled_memory_bytes"] = audit.memory.device_bytes
    return found


def step_suite(request: Request) -> Iterator[Result]:
    """Real steps beside jit with the same shardings, taken in turns; and calls.

    Autopar's result has its time over that of the user's own step, annotated, and of
    the step as it was planned (`benchmarks/step_time.py`).

    First calls, in processes of their own, are left out of small runs.
    """
    from benchmarks.call_time import measure_calls, measure_first_call
    from benchmarks.step_time import measure

    rounds = request.rounds or (5 if request.small else 20)
    small = request.small and request.models is None
    chosen = replace(request, models=("mlp",)) if small else request
    for model, mesh in chosen.cases():
        for each in measure(build(model), mesh, rounds):
            values: dict[str, float] = {
                "collective_bytes": each.collective_bytes,
                "temp_bytes": each.temp_bytes,
            }
            timed = {
                "median_seconds": each.median_seconds,
                "compile_seconds": each.compile_seconds,
            }
            for baseline, ratio in each.times.items():
                timed[f"times_{baseline.replace(' ', '_')}"] = ratio
            yield Result("step", f"{model} {mesh} {each.program}", values, timed)
    if not request.is_timed:
        return
    measured = [measure_calls(10 * rounds)]
    if not request.small:
        measured.append(measure_first_call(-(-rounds // 7)))
    for found in measured:
        timed = {"median_seconds": found.our_seconds, "times_jit": found.ratio}
        yield Result("step", found.case, timed=timed)


def simulate_suite(request: Request) -> Iterator[Result]:
    """Published tables, predicted; a row is one cell, its error beside it.

    A small run takes two GPUs of the first table.
    """
    from benchmarks.published.constants import Constants
    from benchmarks.published.prediction import predict_table, simulators_of
    from benchmarks.published.table import read_table

    constants = Constants.load()
    paths = request.tables or tuple(sorted(TABLES.glob("*.csv")))
    for path in paths[:1] if request.small else paths:
        table = read_table(path)
        if request.small:
            table = replace(table, rows=table.rows[1:2])
        found = predict_table(table, simulators_of(table, constants), constants)
        for cell in found.cells:
            values = {"absolute_error": abs(cell.error)}
            if cell.predicted is not None:
                values["seconds_per_tflop"] = 1 / cell.predicted
            star = " (projected)" if cell.is_projected else ""
            case = f"{found.name} {cell.num_gpus} {cell.column}{star}"
            yield Result("simulate", case, values, note=cell.plan)
        summary = {
            "mean_absolute_error": found.error(),
            "best_constant_error": found.constant_error(),
        }
        yield Result("simulate", f"{found.name} all", summary)


def pipeline_suite(request: Request) -> Iterator[Result]:
    """How much longer pipelines take than their schedules say."""
    from autopar.runtime.schedule import interleaved, one_f_one_b, zero_bubble_h1
    from benchmarks.pipeline_overhead import NUM_MICROBATCHES, measure

    schedules = [one_f_one_b(4, NUM_MICROBATCHES)]
    if not request.small:
        schedules.append(interleaved(8, NUM_MICROBATCHES, num_submeshes=4))
        schedules.append(zero_bubble_h1(4, NUM_MICROBATCHES))
    seconds, steps = (0.02, 2) if request.small else (0.1, 3)
    steps = request.rounds or steps
    for schedule in schedules:
        found = measure(schedule, seconds, steps)
        yield Result(
            *("pipeline", f"{found.schedule} {found.num_stages} stages"),
            {
                "theory_seconds": found.theory_seconds,
                "simulated_seconds": found.simulated_seconds,
            },
            {"times_theory": found.best_ratio, "median_times": found.median_ratio},
        )


def ray_suite(request: Request) -> Iterator[Result]:
    """Steps on two virtual hosts of a local Ray cluster, beside one process.

    In a process of its own: Ray forks, which one that has run JAX should not.
    """
    from benchmarks.ray_step import DEVICES, HOSTS, planned_bytes

    rounds = request.rounds or (5 if request.small else 20)
    for model in request.models or ("mlp",):
        case = f"{model} {HOSTS} hosts of {DEVICES}"
        if not request.is_timed:
            yield Result("ray", case, {**planned_bytes(build(model))})
            continue
        found = _ray_measurement(model, rounds)
        values = {
            "collective_bytes": found.collective_bytes,
            "peak_bytes": found.peak_bytes,
        }
        timed = {
            "first_call_seconds": found.first_call_seconds,
            "median_seconds": found.ray_seconds,
            "times_one_process": found.ray_seconds / found.local_seconds,
        }
        yield Result("ray", case, {**values}, timed)


def _ray_measurement(model: str, rounds: int) -> Measurement:
    """What a new process prints.

    Raises:
      RuntimeError: it failed, or had not ended after `RAY_SECONDS`.
    """
    from benchmarks.ray_step import Measurement

    command = ["-m", "benchmarks.ray_step", "--json", f"--model={model}"]
    with subprocess.Popen(
        [sys.executable, *command, f"--rounds={rounds}"],
        cwd=Path(__file__).parents[1],
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
    lines = printed.splitlines()
    if process.returncode or not lines:
        why = (told.splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"The steps on Ray must succeed, but failed: {why}")
    return Measurement(**json.loads(lines[-1]))


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process; on SIGTERM it ends its Ray cluster too."""
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


SUITES: dict[str, Callable[[Request], Iterator[Result]]] = {
    "plan": plan_suite,
    "quality": quality_suite,
    "step": step_suite,
    "simulate": simulate_suite,
    "pipeline": pipeline_suite,
    "ray": ray_suite,
}


def run(
    suites: Sequence[str], request: Request, tell: Callable[[Result], None]
) -> tuple[Result, ...]:
    """The results of some suites; each is told as it comes.

    One suite of several that fails leaves a result that says so, and the others run.

    Raises:
      ValueError: an unknown suite, with the nearest name.
    """
    chosen = {name: look_up("suite", name, SUITES) for name in suites}
    found: list[Result] = []

    def keep(result: Result) -> None:
        tell(result)
        found.append(result)

    for name, suite in chosen.items():
        try:
            for result in suite(request):
                keep(result)
        except Exception as error:
            if len(chosen) == 1:
                raise
            keep(Result(name, FAILED, note=f"{type(error).__name__}: {error}"))
    return tuple(found)
