"""`autopar bench`: the suites, their results kept and compared.

What they need is imported when they run (`bench_run.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.commands.step_options import (
    Args,
    Budget,
    ClusterOption,
    Microbatches,
    Remat,
    Settings,
)
from benchmarks.bench_run import ALL, Asked, judge_files, run_suites

bench = typer.Typer(
    help="Benchmarks: what plans cost, and how near the truth that is.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        help="Models by name, such as gpt or gpt-1.3b, and steps of your own as "
        "MODULE:NAME, importable from the current folder; what NAME may be is told by "
        "autopar plan --help.",
    ),
]
_Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="The same as TARGET; may be repeated."),
]
_Meshes = Annotated[
    list[str] | None,
    typer.Option("--mesh", help="Axes such as 'x:2;y:4'; may be repeated."),
]
_Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="How to parallelize, as in Python: 'Zero(stage=3)'; may be repeated.",
    ),
]
_Rounds = Annotated[
    int | None, typer.Option("--rounds", help="Timed rounds of each case.")
]
_Devices = Annotated[
    str,
    typer.Option(
        "--devices", help="Virtual CPU devices, or 'here' for those of this machine."
    ),
]
_Small = Annotated[bool, typer.Option("--small", help="Toy sizes: seconds a suite.")]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write the results to this file.")
]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write them as a page with plots.")
]
_Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        help="Compare with this result file; exit code 1 if a number got worse.",
    ),
]


@bench.command()
def plan(
    targets: _Targets = None,
    models: _Models = None,
    args: Args = None,
    settings: Settings = None,
    meshes: _Meshes = None,
    cluster: ClusterOption = None,
    methods: _Methods = None,
    budget: Budget = None,
    microbatches: Microbatches = None,
    remat: Remat = None,
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Time to plan, the gap of each plan, what a step takes and holds.

    Nothing is compiled and nothing run, and no plan is taken from the cache. Sizes are
    those of the largest problem that the solver was given.
    """
    run_suites(["plan"], Asked(**locals()))


@bench.command()
def quality(
    targets: _Targets = None,
    models: _Models = None,
    args: Args = None,
    settings: Settings = None,
    meshes: _Meshes = None,
    methods: _Methods = None,
    budget: Budget = None,
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """The solver beside every named method.

    Modelled seconds; bytes of collectives as planned, lowered and compiled; memory as
    predicted and compiled. With --method, beside these alone.
    """
    run_suites(["quality"], Asked(**locals()))


@bench.command()
def step(
    targets: _Targets = None,
    models: _Models = None,
    args: Args = None,
    settings: Settings = None,
    meshes: _Meshes = None,
    rounds: _Rounds = None,
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Real steps beside jit with the same shardings.

    In turns, medians and their spread: jit of the step as it is written with every
    result annotated, of the same graph, and with annotated arguments only. If nothing
    is named, calls of 500 leaves too. Example arguments without values get some.
    """
    run_suites(["step"], Asked(**locals()))


@bench.command()
def simulate(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="Models and steps of your own, as for the other suites; or published "
            "tables, as paths of CSV files. Default: the Alpa paper's tables.",
        ),
    ] = None,
    models: _Models = None,
    args: Args = None,
    settings: Settings = None,
    meshes: _Meshes = None,
    cluster: ClusterOption = None,
    methods: _Methods = None,
    budget: Budget = None,
    microbatches: Microbatches = None,
    remat: Remat = None,
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Predicted steps on clusters; published tables, every cell.

    Example:

    \b
        autopar bench simulate gpt-1.3b --cluster 1x8xV100 --set remat=true \\
            --set num_layers=8 --method 'PipelineParallel(2, 64)'
    """
    run_suites(["simulate"], Asked(**locals()))


@bench.command()
def pipeline(
    rounds: _Rounds = None,
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """How much longer pipelines take than their schedules say."""
    run_suites(["pipeline"], Asked(**locals()))


@bench.command()
def ray(
    targets: _Targets = None,
    models: _Models = None,
    args: Args = None,
    settings: Settings = None,
    rounds: _Rounds = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Steps on two Ray hosts beside one process.

    The hosts are virtual ones of a local cluster, which is started and ended.
    """
    run_suites(["ray"], Asked(**locals()))


@bench.command("all")
def run_all(
    devices: _Devices = "8",
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Every suite, one after the other."""
    run_suites(ALL, Asked(**locals()))


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
) -> None:
    """What changed between two result files; exit code 1 if worse."""
    judge_files(before, after)
