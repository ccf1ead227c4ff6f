"""`autopar bench`: the benchmarks of the checkout, their results kept and compared.

The benchmarks lie in `benchmarks/`, which only a source checkout has: what they need is
imported when they run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_ROOT = Path(__file__).parents[2]
_DEVICES = 8

bench = typer.Typer(
    help="Benchmarks: what plans cost, and how near the truth that is.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

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
        help="Compare with this result file; exit code 1 if a number rose.",
    ),
]
_Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model by name; may be repeated."),
]
_Meshes = Annotated[
    list[str] | None,
    typer.Option("--mesh", help="Axes such as 'x:2;y:4'; may be repeated."),
]
_Rounds = Annotated[int | None, typer.Option(help="Timed rounds of each case.")]


@bench.command()
def plan(
    models: _Models = None,
    meshes: _Meshes = None,
    cluster: Annotated[
        str | None, typer.Option(help="A preset such as 8x8xH100 to plan for.")
    ] = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Time to plan, the gap of each plan, what a step takes and holds."""
    asked = {"models": models, "meshes": meshes, "cluster": cluster, "small": small}
    _run(["plan"], asked, json, html, against)


@bench.command()
def quality(
    models: _Models = None,
    meshes: _Meshes = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """The solver beside every named method.

    Modelled, lowered and compiled.
    """
    asked = {"models": models, "meshes": meshes, "small": small}
    _run(["quality"], asked, json, html, against)


@bench.command()
def step(
    models: _Models = None,
    meshes: _Meshes = None,
    rounds: _Rounds = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Real steps beside jit with the same shardings.

    On eight virtual devices, in turns: jit of the user's own step with every result
    annotated, of the same graph, and with annotated arguments only; and calls of 500
    leaves beside those of jit.
    """
    asked = {"models": models, "meshes": meshes, "rounds": rounds, "small": small}
    _run(["step"], asked, json, html, against)


@bench.command()
def simulate(
    tables: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TABLE.csv",
            help="Published tables; the Alpa paper's if left out.",
        ),
    ] = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Published throughput tables, every cell predicted."""
    _run(["simulate"], {"tables": tables, "small": small}, json, html, against)


@bench.command()
def pipeline(
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """How much longer pipelines take than their schedules say."""
    _run(["pipeline"], {"small": small}, json, html, against)


@bench.command()
def ray(
    models: _Models = None,
    rounds: _Rounds = None,
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Steps on two Ray hosts beside one process.

    The hosts are virtual ones of a local cluster, which is started and ended.
    """
    asked = {"models": models, "rounds": rounds, "small": small}
    _run(["ray"], asked, json, html, against)


@bench.command("all")
def run_all(
    small: _Small = False,
    json: _Json = None,
    html: _Html = None,
    against: _Against = None,
) -> None:
    """Every suite, one after the other."""
    suites = list(_checkout("benchmarks.suites").SUITES)
    _run(suites, {"small": small}, json, html, against)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
) -> None:
    """What rose between two result files; exit code 1 if anything did."""
    results = _checkout("benchmarks.results")
    _judge(
        results.compare(results.ResultFile.load(before), results.ResultFile.load(after))
    )


def _run(
    suites: Sequence[str],
    asked: dict[str, Any],
    json: Path | None,
    html: Path | None,
    against: Path | None,
) -> None:
    module, results = map(_checkout, ("benchmarks.suites", "benchmarks.results"))
    for path in filter(None, (json, html)):
        _check_folder(path)
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in asked.items()
        if value
    }
    request = module.Request(**given)
    kept = None if against is None else results.ResultFile.load(against)
    from ..clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(_DEVICES)
    found = module.run(suites, request, _tell)
    file = results.ResultFile(results.Machine.here(), found)
    if json is not None:
        file.save(json)
        print(f"written to {json}")
    if html is not None:
        page = _checkout("benchmarks.result_page").page(file)
        html.write_text(page)
        print(f"written to {html}")
    if kept is not None:
        _judge(results.compare(kept, file))
    if any(each.case == results.FAILED for each in found):
        raise typer.Exit(1)


def _check_folder(path: Path) -> None:
    """Before anything runs, which may take long.

    Raises:
      ValueError: the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"results are written to a folder that is there, but that of {path} is "
            f"not; make it first."
        )


def _tell(result: Any) -> None:
    print(result, flush=True)


def _judge(comparison: Any) -> None:
    print(comparison)
    if comparison.regressions:
        raise typer.Exit(1)


def _checkout(module: str) -> Any:
    """A module of the checkout's benchmarks.

    Raises:
      ValueError: this is an installed package without them, or one of their packages
        is missing.
    """
    if not (_ROOT / "benchmarks" / "suites.py").exists():
        raise ValueError(
            "autopar bench runs the benchmarks of autopar's source checkout, which the "
            "installed package does not hold; run it from a checkout."
        )
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the benchmarks need the package {error.name!r}, which is not installed; "
            f"pip install 'autopar[dev]'."
        ) from error
