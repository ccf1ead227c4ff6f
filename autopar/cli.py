"""The command line: `autopar demo | plan | explain | doctor`.

jax is configured inside the commands: devices are fixed when it is first used.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .cluster import Cluster
    from .parallel_plan import Plan

app = typer.Typer(
    help="Automatic parallelization of unmodified JAX train steps.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_DEBUG = "--debug"
_OPERATORS = typer.Option(
    "--operators", help="List every operator, not only heavy ones."
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one line and exit code 1."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        app([each for each in given if each != _DEBUG], prog_name="autopar")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if _DEBUG in given:
            traceback.print_exc()
        else:
            name = "" if _is_told_well(error) else f"{type(error).__name__}: "
            print(f"error: {name}{error}", file=sys.stderr)
            print("(autopar --debug shows where)", file=sys.stderr)
        sys.exit(1)


def _is_told_well(error: Exception) -> bool:
    """Whether the message stands without the error's type."""
    from .errors import AutoparError

    kinds = (AutoparError, ValueError, TypeError, OSError, NotImplementedError)
    return isinstance(error, kinds)


def _print_version(value: bool) -> None:
    if value:
        print(f"autopar {metadata.version('autopar')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the traceback of an error.")
    ] = False,
) -> None:
    del version, debug  # The one acts by its callback, the other in `main`.


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    devices: Annotated[int, typer.Option(help="Virtual CPU devices.")] = 8,
) -> None:
    """Train a small GPT on virtual devices of this machine: plan, audit, proof.

    Takes about a minute, and needs no accelerator and no network. The same steps are
    run by jax.jit on one device, and every loss is compared.
    """
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print("autopar demo: starting jax")
    from .virtual_devices import use_virtual_devices

    use_virtual_devices(devices)
    from .demo import run_demo

    if not run_demo(console, steps=steps, num_devices=devices).ok:
        raise typer.Exit(1)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="What to plan, importable from the current folder.",
        ),
    ],
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Example arguments of the step: a tuple, or a function that returns "
            "one.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A preset such as 8x8xH100 (hosts x devices x kind), or the path of a "
            "TOML file. Default: the devices here.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Mesh axes, such as 'data:2;model:4'; a size of -1 fills. Default: "
            "one axis for each level of the cluster.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the plan there, as JSON.")
    ] = None,
    operators: Annotated[bool, _OPERATORS] = False,
) -> None:
    """Plan a train step for a cluster, which need not be here.

    MODULE:FUNCTION names a function without arguments that returns (step, args): the
    step, and a tuple of example arguments for it. With --args it names the step itself.
    Example arguments are arrays or jax.ShapeDtypeStruct: only shapes and dtypes count,
    and nothing is run.

    Example, with a file train.py in the current folder:

    \b
        def for_autopar():
            return train_step, (state, batch)

    \b
        autopar plan train:for_autopar --cluster 2x8xH100 --mesh 'data:4;model:4'
    """
    found = _plan(target, args, cluster, mesh)
    found.explain(operators=operators)
    if output is not None:
        found.save(output)
        print(f"\nwritten to {output}")


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="A plan, as plan.save wrote it.")],
    operators: Annotated[bool, _OPERATORS] = False,
) -> None:
    """Print a saved plan: what is split how, and what it costs."""
    from .parallel_plan import Plan

    Plan.load(path).explain(operators=operators)


@app.command()
def doctor(
    coverage: Annotated[
        bool, typer.Option(help="Print what becomes of each of JAX's primitives.")
    ] = False,
) -> None:
    """Check that this installation can plan and run; exit code 1 if not."""
    from .doctor import run_checks

    if coverage:
        from .coverage import format_coverage

        print(format_coverage())
        return
    is_well = True
    for check in run_checks():
        print(check, flush=True)
        is_well = is_well and (check.ok or not check.is_needed)
    print("\nall is well" if is_well else "\nsomething is missing, see FAIL above")
    if not is_well:
        raise typer.Exit(1)


def _plan(target: str, args: str | None, cluster: str | None, mesh: str | None) -> Plan:
    """The plan of the step that the command line names."""
    from .api import ParallelFunction, parallelize

    if args is None:
        made = _look_up(target)()
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                f"{target} must return (step, args), but returned {made!r}; if it is "
                "the step itself, name its example arguments with --args."
            )
        step, examples = made
    else:
        step, examples = _look_up(target), _look_up(args)
        examples = examples() if callable(examples) else examples
    if not isinstance(examples, tuple):
        raise TypeError(
            f"the example arguments must be a tuple, one item for each argument of the "
            f"step, but got a {type(examples).__name__}; write (state, batch)."
        )
    if isinstance(step, ParallelFunction):
        if cluster or mesh:
            raise ValueError(
                "--cluster and --mesh need the plain step, but the one given is "
                "parallelized with its own; leave them out, or give its function."
            )
        return step.plan(*examples)
    if not callable(step):
        raise TypeError(f"the step must be a function, but got {step!r}.")
    options: dict[str, Any] = {"mesh": mesh, "cluster": _cluster(cluster)}
    return parallelize(step, **options).plan(*examples)


def _cluster(text: str | None) -> Cluster | None:
    from .cluster import Cluster

    if text is None:
        return None
    is_file = text.endswith(".toml") or "/" in text
    return Cluster.load(text) if is_file else Cluster.preset(text)


def _look_up(target: str) -> Any:
    """What `module:name` names, looked for from the current folder first."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ValueError(
            f"a target is MODULE:NAME, such as train:for_autopar, but got {target!r}."
        )
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(module_name.removesuffix(".py").replace("/", "."))
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each in vars(module) if not each.startswith("_")]
            raise ValueError(
                f"module {module_name!r} has no {name!r}; it has "
                f"{', '.join(known[:20]) or 'nothing public'}."
            )
        found = getattr(found, part)
    return cast("Any", found)


if __name__ == "__main__":
    main()
