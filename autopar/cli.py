"""The command line: `autopar demo | plan | explain | diff | report | bench | ...`.

jax is configured inside the commands: devices are fixed when it is first used.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .commands import (
    calibrate_command,
    compare_command,
    explain_command,
    plan_command,
    report_command,
    targets_command,
)

app = typer.Typer(
    help="Automatic parallelization of unmodified JAX train steps.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_DEBUG = "--debug"
_CHECKOUT = Path(__file__).parents[1]
_PASSED_ON = {  # what follows is for another program
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one line and exit code 1."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        # What follows `launch` may be the script's own.
        end = given.index("launch") if "launch" in given else len(given)
        own = [each for each in given[:end] if each != _DEBUG]
        app([*own, *given[end:]], prog_name="autopar")
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
    from .clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(devices)
    from .commands.demo import run_demo

    if not run_demo(console, steps=steps, num_devices=devices).ok:
        raise typer.Exit(1)


app.command()(plan_command.plan)
app.command()(compare_command.compare)
app.command()(calibrate_command.calibrate)
app.command()(explain_command.explain)
app.command()(explain_command.diff)
app.command()(report_command.report)
app.add_typer(targets_command.targets, name="targets")


@app.command(context_settings={**_PASSED_ON, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Benchmarks: what plans cost, and how near the truth that is."""
    if not (_CHECKOUT / "benchmarks" / "bench_command.py").exists():
        raise ValueError(
            "autopar bench runs the benchmarks of autopar's source checkout, which the "
            "installed package does not hold; run it from a checkout."
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    try:
        found = import_module("benchmarks.bench_command").bench
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the benchmarks need the package {error.name!r}, which is not installed; "
            f"pip install 'autopar[dev]'."
        ) from error
    code = found(context.args, prog_name="autopar bench", standalone_mode=False)
    if code:
        raise typer.Exit(code)


@app.command(context_settings=_PASSED_ON)
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python script to run.")],
    hosts: Annotated[int, typer.Option(help="Virtual hosts.")] = 2,
    devices_per_host: Annotated[
        int, typer.Option(help="Virtual CPU devices of each host.")
    ] = 4,
) -> None:
    """Run a script with a local Ray cluster of virtual hosts.

    autopar.Cluster.ray() in the script finds the cluster. What follows the script's
    name is passed to it; the exit code is the script's.

    Example:

    \b
        autopar launch --hosts 2 --devices-per-host 4 train.py --steps 10
    """
    from .commands.launch import launch as run_script

    code = run_script(script, context.args, hosts, devices_per_host)
    if code:
        raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Check that this installation can plan and run; exit code 1 if not."""
    from .commands.doctor import run_checks

    is_well = True
    for check in run_checks():
        print(check, flush=True)
        is_well = is_well and check.ok
    print("\nall is well" if is_well else "\nsomething is missing, see FAIL above")
    if not is_well:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
