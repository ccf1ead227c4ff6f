"""`autopar plan`: plan a step for a cluster, compare it, keep it.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from .step_options import (
    Args,
    Attention,
    Budget,
    ClusterOption,
    Microbatches,
    Operators,
    Remat,
    Settings,
)

if TYPE_CHECKING:
    from ..api import ParallelFunction
    from ..clusters.cluster import Cluster
    from ..planner.reasons import Alternative
    from ..steps.parallel_plan import Plan
    from .plan_targets import Target

PlanTarget = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="MODULE:NAME, importable from the current folder, or a model by name.",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Mesh axes, such as 'data:2;model:4'; a size of -1 fills. Default: "
        "shapes that follow the cluster's levels are searched.",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="How to parallelize, as in Python: 'Auto()', 'Zero(stage=3)', "
        "'PipelineParallel(num_microbatches=16)'. Default: shardings are searched.",
    ),
]
_Offload = Annotated[
    str | None,
    typer.Option(
        "--offload",
        help="What lies in the host's memory: optimizer_state, state (parameters "
        "too), or auto: as much of the former as the budget takes.",
    ),
]
_Like = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="PLAN",
        help="Keep what this plan chose for what is still there, plan the rest, "
        "and print what changes.",
    ),
]
_Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATH=SPEC",
        help="What if: pin an argument, by path or expression, as in "
        "'params/w=[-, model]'; plan again, print what changes. May be repeated.",
    ),
]
_Check = Annotated[
    Path | None,
    typer.Option(
        "--check",
        metavar="PLAN",
        help="Only compare with this plan: exit code 0 if the plan made now is the "
        "same, else 1 with what changes.",
    ),
]
_Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="With --check: how much more the step may take and a device hold, as "
        "a part of what was kept.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option("--out", "--output", help="Write the plan there, as JSON."),
]
_Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the plan's programs for the cluster too, which need not be "
        "here: their collectives, audited, and memory. See autopar targets.",
    ),
]
_CompileSeconds = Annotated[
    float | None,
    typer.Option(help="With --compile: what one program may take."),
]
_Compare = Annotated[
    bool,
    typer.Option(help="Plan the named methods too, and print all in one table."),
]


def plan(
    target: PlanTarget,
    args: Args = None,
    cluster: ClusterOption = None,
    budget: Budget = None,
    mesh: Mesh = None,
    method: Method = None,
    microbatches: Microbatches = None,
    remat: Remat = None,
    offload: _Offload = None,
    attention: Attention = None,
    settings: Settings = None,
    like: _Like = None,
    pins: _Pins = None,
    check: _Check = None,
    tolerance: _Tolerance = 0.01,
    output: _Out = None,
    compare: _Compare = True,
    operators: Operators = False,
    compile: _Compile = False,
    compile_seconds: _CompileSeconds = None,
) -> None:
    """Plan a train step for a cluster, which need not be here.

    TARGET is one of

    \b
      MODULE:FUNCTION  a function without arguments that returns (step, args)
      MODULE:OBJECT    an object with a method step, and a method abstract() that
                       returns args; or a function that returns such an object
      MODULE:STEP      the step itself, with its args named by --args
      NAME             a model of autopar.models: gpt-39b, gpt-175b, llama-8b,
                       moe-70b, wrn-13b and others

    where args is a tuple with an example for each argument of the step: arrays or
    jax.ShapeDtypeStruct. Only shapes and dtypes count, and nothing is run.

    Example, with a file train.py in the current folder:

    \b
        def for_autopar():
            return train_step, (state, batch)

    \b
        autopar plan train:for_autopar --cluster 2x8xH100 --budget 70GiB
        autopar plan llama-8b --set scan_layers=true --cluster 8x8xH100 --out plan.json
        autopar plan train:for_autopar --cluster 2x8xH100 --check plan.json
        autopar plan gpt-39b --cluster 8x8xV100 --method 'Auto()'
    """
    from ..plans.plan import TriedPlan
    from ..report.compiled_figures import CompiledFigures
    from ..steps.parallel_plan import Plan
    from ..targets.target import check_compilable
    from .plan_targets import find_step, parse_method, parse_pins, parse_settings

    if check is not None and (output is not None or pins or like is not None):
        raise ValueError(
            "--check compares a plan and writes nothing, so --out, --pin and --like "
            "must be left out with it; write the new plan by a command of its own."
        )
    kept = None if check is None else Plan.load(check)
    before = None if like is None else Plan.load(like)
    more_pins = parse_pins(pins or [])

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    found = find_step(target, args, parse_settings(settings or []))
    options = {
        "method": None if method is None else parse_method(method),
        "mesh": mesh,
        "cluster": find_cluster(cluster),
        "memory_budget": budget,
        "num_microbatches": microbatches,
        "remat": remat,
        "offload": offload,
        "attention": attention,
        "like": before,
    }
    is_compared = compare and kept is None and before is None and not more_pins
    is_compared = is_compared and method is None
    if compile:
        check_compilable(options["cluster"], mesh)
    limit = (compile_seconds or inf) if compile else None
    made, rows = _plan(console, found, options, is_compared, limit)
    if kept is not None:
        _check(console, made, kept, tolerance)
        return
    if more_pins:
        before, made = made, made.what_if(more_pins)
    if rows:
        more = (TriedPlan(e.title, e.plan.predicted) for e in rows[1:] if e.plan)
        made = replace(made, tried=(*made.tried, *more))
    made.explain(operators=operators)
    if before is not None:
        console.print()
        before.diff(made).print()
    if len(more_pins) > 1:
        console.print("\nwhat each pin adds to a step", style="bold")
        console.print(str(made.pin_costs()), markup=False)
    if rows:
        from ..report.method_comparison import comparison_table

        console.print("\nbeside named methods, on the same costs", style="bold")
        console.print(comparison_table(rows))
    if output is not None:
        made.save(output)
        print(f"\nwritten to {output}")
    if isinstance(made.compiled, CompiledFigures):
        for _, audit in made.compiled.audits:
            audit.raise_if_wrong()
        made.compiled.check_fits()


def _check(console: Console, made: Plan, kept: Plan, tolerance: float) -> None:
    """Says whether a plan is the kept one; exit code 1 if not."""
    from ..plans.kept_plan import check_kept

    found = check_kept(made.decision, kept.decision, tolerance)
    if found.is_kept:
        console.print(str(found), markup=False)
        return
    found.diff.print()
    raise ValueError(
        f"{found}. If it is as wanted now, keep it: autopar plan ... --out with the "
        f"path of the kept plan."
    )


def find_cluster(text: str | None) -> Cluster | None:
    """A preset by name, or a cluster file by path; None for the devices here."""
    from ..clusters.cluster import Cluster

    if text is None:
        return None
    is_file = text.endswith(".toml") or "/" in text
    return Cluster.load(text) if is_file else Cluster.preset(text)


def _plan(
    console: Console,
    target: Target,
    options: Mapping[str, Any],
    compare: bool,
    compile_limit: float | None,
) -> tuple[Plan, list[Alternative]]:
    """The plan of a step as `step.plan` gives it, and those of named methods beside it.

    Raises:
      InfeasiblePlanError: nothing fits; names what would.
    """
    from ..errors import InfeasiblePlanError
    from ..report.method_comparison import compare as compared
    from ..steps.compiling import compiled_figures
    from ..steps.step_origin import StepOrigin

    step = _parallel(target, options)
    with progress(console) as status:
        status.update(f"tracing and planning {target.name}")
        try:
            made = step._plan(target.args, {}, compile_limit or 0.0)
        except InfeasiblePlanError as error:
            status.update("nothing fits; looking for what would")
            more = _suggestion(target, step)
            raise (error.saying_more(more) if more else error) from None
        if 0 < made.predicted.budget_bytes < made.predicted.peak_bytes:
            status.update("nothing fits; looking for what would")
            console.print(_suggestion(target, step), markup=False)
        rows: list[Alternative] = []
        if compare and isinstance(made.origin, StepOrigin):
            origin = made.origin
            for row in compared(origin.planned, origin.leaves, origin.options):
                status.update(f"comparing: {row.title} is planned")
                rows.append(row)
        if compile_limit is not None:
            status.update(f"compiling {target.name}")
            figures = compiled_figures(step.lower(*target.args), compile_limit)
            made = replace(made, compiled=figures)
    return made, rows


def _suggestion(target: Target, step: ParallelFunction) -> str:
    """What to ask for where nothing fits; "" where nothing is left free."""
    from ..planner.suggestions import suggestion
    from ..planner.whole_step import trace_whole

    with step._open(target.args, {}) as call:
        whole = trace_whole(*step._traced_call(call), step.options)
        return suggestion(whole, step.options)


def _parallel(target: Target, options: Mapping[str, Any]) -> ParallelFunction:
    """The step of a target, parallelized: one program, unless a method says otherwise.

    Raises:
      ValueError: options are given for a step that has its own.
    """
    from ..api import ParallelFunction, parallelize
    from ..methods.methods import ShardParallel
    from ..plans.staged_plan import StagedPlan

    if isinstance(target.step, ParallelFunction):
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                "--cluster, --mesh, --method, --budget, --microbatches, --remat, "
                "--offload and --like need the plain step, but the one given is "
                f"parallelized with its own, and got {', '.join(given)}; leave them "
                "out, or give its function."
            )
        return target.step
    like = options["like"]
    is_staged = like is not None and isinstance(like.decision, StagedPlan)
    if options["method"] is None and not is_staged:
        options = {**options, "method": ShardParallel()}
    return parallelize(target.step, **options)


@contextmanager
def progress(console: Console) -> Iterator[Status]:
    """A line that moves on a terminal; what autopar logs is printed above it."""
    log = logging.getLogger("autopar")
    handler = _Printed(Console(stderr=True, highlight=False, soft_wrap=True))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with console.status("starting jax") as status:
            yield status
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _Printed(logging.Handler):
    """Prints records with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console, self.start = console, perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        seconds = perf_counter() - self.start
        line = f"{seconds:6.1f} s  {record.getMessage()}"
        self.console.print(line, style="dim", markup=False)
