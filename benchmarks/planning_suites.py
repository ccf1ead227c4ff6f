"""Suites that run nothing: plans, plans beside named methods, predicted steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.request import Case, Request
from benchmarks.results import Result

if TYPE_CHECKING:
    from autopar.solver import Assignment
    from autopar.steps.parallel_plan import Plan
    from benchmarks.published.runs import Run

TABLES = Path(__file__).parent / "published"


def plan_suite(request: Request) -> Iterator[Case]:
    """Time to plan and to solve, gap and sizes, here or on a cluster one lacks."""
    for name, mesh, method in _planned_cases(request):
        words = name, mesh or request.cluster or "", method or ""
        case = " ".join(word for word in words if word)
        yield Case(case, lambda a=(name, mesh, method, case): [_plan(request, *a)])


def _planned_cases(request: Request) -> Iterator[tuple[str, str, str | None]]:
    """Name, mesh ("" searches for one) and method of each case."""
    is_searched = request.place is not None or bool(request.methods)
    if is_searched and request.meshes is None:
        cases = [(name, "") for name in request.names()]
    else:
        cases = list(request.cases())
    for name, mesh in cases:
        for method in request.methods or (None,):
            yield name, mesh, method


def _plan(
    request: Request, name: str, mesh: str, method: str | None, case: str
) -> Result:
    plan, solver, seconds = _planned_on(request, name, mesh, method)
    values = {**_predicted(plan), **solver.sizes}
    timed = {"plan_seconds": seconds, "solver_seconds": solver.seconds}
    return Result("plan", case, values, timed, note=_where(plan, mesh))


def _planned_on(
    request: Request, name: str, mesh: str, method: str | None
) -> tuple[Plan, _Solver, float]:
    """A plan, what the solver had to do for it, and the seconds of both."""
    import autopar
    from autopar.commands.plan_targets import parse_method

    target = request.find(name)
    step = autopar.parallelize(
        target.step,
        mesh=mesh or None,
        cluster=request.place,
        method=None if method is None else parse_method(method),
        **request.options,
    )
    arguments = target.abstract()
    start = perf_counter()
    with _solver_watched() as solver:
        plan = step.plan(*arguments)
    return plan, solver, perf_counter() - start


def _where(plan: Plan, mesh: str) -> str:
    """The mesh that was found, and the stages of a pipeline."""
    from autopar.plans.staged_plan import StagedPlan

    decision = plan.decision
    if isinstance(decision, StagedPlan):
        meshes = ", ".join(map(str, decision.meshes))
        return (
            f"{decision.num_stages} stages on {meshes}, {decision.num_microbatches} "
            f"microbatches, {decision.schedule}"
        )
    return "" if mesh else f"on {decision.mesh}"


def _predicted(plan: Plan) -> dict[str, float]:
    predicted = plan.predicted
    return {
        "modelled_seconds": predicted.step_seconds,
        "collective_bytes": predicted.collective_bytes,
        "peak_bytes": predicted.peak_bytes,
        "gap": predicted.optimality_gap,
    }


@dataclass(eq=False)
class _Solver(logging.Handler):
    """What the solver was asked while a step was planned: the largest, and seconds."""

    seconds: float = 0.0
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        solved: Assignment | None = getattr(record, "assignment", None)
        if solved is None:
            return
        self.seconds += solved.seconds
        sizes = {name: float(size) for name, size in vars(record)["sizes"].items()}
        if sizes["choices"] >= self.sizes.get("choices", 0):
            self.sizes = sizes


@contextmanager
def _solver_watched() -> Iterator[_Solver]:
    log, found = logging.getLogger("autopar"), _Solver()
    before = log.level
    log.addHandler(found)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.removeHandler(found)
        log.setLevel(before)


def quality_suite(request: Request) -> Iterator[Case]:
    """The solver beside every named method: modelled, lowered and compiled."""
    request = request.first()
    seen: set[str] = set()
    for name, mesh in request.cases():
        for title, (method, own) in _methods(request, mesh).items():
            case = f"{name} {own} {title}"
            if case not in seen:
                seen.add(case)
                given = name, own, method, case
                yield Case(case, lambda given=given: [_quality(request, *given)])


def _methods(request: Request, mesh: str) -> Mapping[str, tuple[Any, str]]:
    """A method and its mesh, by what it is called: those asked for, or all named."""
    import autopar
    from autopar.commands.plan_targets import parse_method

    found: dict[str, tuple[Any, str]] = {"solver": (None, mesh)}
    if request.methods:
        asked = {text: parse_method(text) for text in request.methods}
        return found | {text: (method, mesh) for text, method in asked.items()}
    found["data parallel"] = autopar.DataParallel(), mesh
    for stage in (1, 2, 3):
        found[f"ZeRO-{stage}"] = autopar.Zero(stage=stage), mesh
    number = request.num_devices
    tensor = next((size for size in (4, 2) if number % size == 0), number)
    axes = f"data:{number // tensor};tensor:{tensor}"
    found["Megatron"] = autopar.Megatron(tensor=tensor), axes
    found["Megatron sequence"] = autopar.Megatron(tensor=tensor, sequence=True), axes
    if not request.small and number % 8 == 0:
        three = autopar.ThreeD(number // 4, 2, 2, num_microbatches=4)
        found["3-D"] = three, f"data:{number // 4};tensor:2;pipeline:2"
    return found


def _quality(request: Request, name: str, mesh: str, method: Any, case: str) -> Result:
    import autopar

    target = request.find(name)
    own = {} if _names_devices(method) else {"mesh": mesh}
    start = perf_counter()
    try:
        step = autopar.parallelize(target.step, method=method, **own, **request.options)
        compiled = step.lower(*target.abstract()).compile()
    except (ValueError, NotImplementedError) as error:
        if method is None:
            raise
        return Result("quality", case, note=str(error).split(";")[0])
    seconds = perf_counter() - start
    return Result("quality", case, _audited(compiled), {"seconds": seconds})


def _names_devices(method: Any) -> bool:
    """Whether a method says itself how devices are dealt out."""
    import autopar

    kinds = autopar.ThreeD, autopar.PipelineParallel, autopar.Auto
    return isinstance(method, kinds)


def _audited(compiled: Any) -> dict[str, float]:
    """What was predicted and what compilers made of it; of pipelines by stage only."""
    from autopar.steps.lowered_pipeline import CompiledPipeline

    audit = compiled.audit()
    audit.raise_if_wrong()
    found = _predicted(compiled.plan)
    if isinstance(compiled, CompiledPipeline):
        return found
    found["lowered_bytes"] = sum(row.lowered_bytes for row in audit.rows)
    found["compiled_bytes"] = sum(row.compiled_bytes or 0 for row in audit.rows)
    if audit.memory is not None:
        found["compiled_memory_bytes"] = audit.memory.device_bytes
    return found


def simulate_suite(request: Request) -> Iterator[Case]:
    """Steps on a cluster as they are predicted; published tables, if none is named.

    A row of a table is one cell, its error beside it. A small run takes two GPUs of
    the first table.
    """
    if request.targets:
        for name, mesh, method in _planned_cases(request):
            place = mesh or request.cluster or f"{request.num_devices} devices"
            case = " ".join((name, place, *([method] if method else ())))
            given = name, mesh, method, case
            yield Case(case, lambda given=given: [_simulated(request, *given)])
        return
    paths = request.tables or tuple(sorted(TABLES.glob("*.csv")))
    for path in paths[:1] if request.small else paths:
        yield Case(path.stem, lambda path=path: _table(path, request.small))


def _simulated(
    request: Request, name: str, mesh: str, method: str | None, case: str
) -> Result:
    plan, _, seconds = _planned_on(request, name, mesh, method)
    predicted = plan.predicted
    values = {
        "step_seconds": predicted.step_seconds,
        "compute_seconds": predicted.compute_seconds,
        "collective_seconds": predicted.collective_seconds,
        "bubble_fraction": predicted.bubble_fraction,
        "collective_bytes": predicted.collective_bytes,
        "peak_bytes": predicted.peak_bytes,
    }
    timed = {"plan_seconds": seconds}
    return Result("simulate", case, values, timed, note=_where(plan, mesh))


def _table(path: Path, small: bool) -> Iterator[Result]:
    from benchmarks.published.runs import constant_error, error_of, read_runs

    runs = read_runs(path)
    if small:
        runs = [run for run in runs if run.group[1:2] == ("2",)]
    for run in runs:
        yield _run(run)
    scored = [run for run in runs if not run.reason] or runs
    summary = {
        "mean_absolute_error": error_of(scored),
        "best_constant_error": constant_error(scored),
    }
    yield Result("simulate", f"{path.stem} all", summary)


def _run(run: Run) -> Result:
    """A run in the unit of its table; what ran out of memory has none."""
    unit = {"Tflop/s": "tflops"}.get(run.unit, run.unit.replace("/", "_per_"))
    numbers = {f"published_{unit}": run.published, f"predicted_{unit}": run.predicted}
    values = {name: number for name, number in numbers.items() if number is not None}
    values["absolute_error"] = abs(run.error)
    reason = f" ({run.reason})" if run.reason else ""
    return Result("simulate", f"{run.name}{reason}", values, note=run.plan)
