"""`autopar plan`: plan a step for a cluster, compare it, keep it.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from .progress import progress
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
    from ..clusters.cluster import Cluster
    from ..lowering.programs import SpmdProgram
    from ..planner.planning import Planned
    from ..plans.parallel_plan import Plan
    from .method_comparison import Row
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
    from ..plans.compiled_figures import CompiledFigures
    from ..plans.parallel_plan import Plan
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
        from .method_comparison import tried_rows

        made = replace(made, tried=(*made.tried, *tried_rows(rows)))
    made.explain(operators=operators)
    if before is not None:
        console.print()
        before.diff(made).print()
    if len(more_pins) > 1:
        console.print("\nwhat each pin adds to a step", style="bold")
        console.print(str(made.pin_costs()), markup=False)
    if rows:
        from .method_comparison import comparison_table

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
) -> tuple[Plan, list[Row]]:
    from ..api import ParallelFunction, parallelize
    from ..step_program import compiled_figures

    if isinstance(target.step, ParallelFunction):
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                "--cluster, --mesh, --method, --budget, --microbatches, --remat, "
                "--offload and --like need the plain step, but the one given is "
                f"parallelized with its own, and got {', '.join(given)}; leave them "
                "out, or give its function."
            )
        step = target.step
    elif options["method"] is not None:
        step = parallelize(target.step, **options)
    else:
        step = None
    if step is not None:
        with progress(console) as status:
            status.update(f"tracing and planning {target.name}")
            made = step.plan(*target.args)
            if compile_limit is not None:
                status.update(f"compiling {target.name}")
                lowered = step.lower(*target.args)
                figures = compiled_figures(lowered, compile_limit)
                made = replace(made, compiled=figures)
            return made, []
    with progress(console) as status:
        return _plan_plain(target, options, compare, compile_limit, status)


def _plan_plain(
    target: Target,
    given: Mapping[str, Any],
    compare: bool,
    compile_limit: float | None,
    status: Status,
) -> tuple[Plan, list[Row]]:
    import jax

    from ..audit.fit import plan_fitting, plan_of_least_memory
    from ..errors import InfeasiblePlanError
    from ..frontend.calls import open_call, plain_function
    from ..frontend.constant_leaves import takes_only_arrays
    from ..frontend.static_arguments import StaticArguments
    from ..options import check_options, resolve_options
    from ..planner.planning import plan_function
    from ..planner.remedies import with_remedy
    from ..planner.traced_step import traced_step
    from ..planner.whole_step import TracedWhole
    from ..step_program import (
        compiled_figures,
        lowered_step,
        program_here,
        target_program,
    )
    from ..targets.target import why_modelled
    from . import method_comparison

    options = resolve_options(target.step, check_options(**given))
    nothing = StaticArguments((), ())
    only_arrays = takes_only_arrays(target.step)
    with open_call(nothing, target.args, {}, only_arrays) as call:
        status.update(f"tracing and planning {target.name}")
        fun = plain_function(target.step, call.statics)
        args, kwargs = call.arguments()

        def refused(
            error: InfeasiblePlanError, whole: TracedWhole
        ) -> InfeasiblePlanError:
            status.update("nothing fits; looking for what would")
            return with_remedy(error, whole, options)

        def program_of(planned: Planned) -> SpmdProgram:
            return target_program(planned, options) or program_here(planned, options)

        try:
            if compile_limit is None:
                planned = plan_function(fun, args, kwargs, options, refused)
            else:
                planned = plan_fitting(
                    *(fun, args, kwargs, options, program_of),
                    refused=refused,
                    elsewhere_seconds=compile_limit,
                )
        except InfeasiblePlanError as error:
            planned = plan_of_least_memory(fun, args, kwargs, options, error)
        _tell(planned)
        rows: list[Row] = []
        if compare:
            leaves = jax.tree.leaves((args, kwargs))
            rows += method_comparison.compare(
                planned,
                leaves,
                options,
                lambda name: status.update(f"comparing with {name}"),
            )
        made = traced_step(planned, call.leaves, options)
        if compile_limit is None:
            figures = why_modelled(planned.cluster, options.mesh)
        else:
            status.update(f"compiling {target.name}")
            program = program_of(planned)
            lowered = lowered_step(planned, program, only_arrays)
            figures = compiled_figures(lowered, compile_limit)
    return replace(made, compiled=figures), rows


def _tell(planned: Planned) -> None:
    log = logging.getLogger("autopar")
    log.info(planned.summary())
    for note in planned.roles.notes:
        log.warning(note)
