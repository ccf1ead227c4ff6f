"""Runs suites: progress, tables, files, exit codes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from autopar.commands.plan_targets import parse_settings

ALL: Sequence[str] = ()  # every suite
_HERE = "here"
_INTERRUPTED = 130


@dataclass(frozen=True)
class Asked:
    """The command line as it was given; nothing is the suite's own choice."""

    targets: Sequence[str] | None = None
    models: Sequence[str] | None = None
    args: str | None = None
    settings: Sequence[str] | None = None
    meshes: Sequence[str] | None = None
    cluster: str | None = None
    methods: Sequence[str] | None = None
    budget: str | None = None
    microbatches: int | None = None
    remat: str | None = None
    rounds: int | None = None
    devices: str = "8"
    small: bool = False
    json: Path | None = None
    html: Path | None = None
    against: Path | None = None

    def request(self, num_devices: int) -> Any:
        """What the suites are asked.

        Raises:
          ValueError: something unknown is named.
        """
        named = [*(self.targets or ()), *(self.models or ())]
        tables = tuple(Path(name) for name in named if name.endswith(".csv"))
        steps = tuple(name for name in named if not name.endswith(".csv"))
        if tables and steps:
            raise ValueError(
                f"tables and models are simulated apart, but got {tables[0]} and "
                f"{steps[0]}; name one kind."
            )
        options = {
            "memory_budget": self.budget,
            "num_microbatches": self.microbatches,
            "remat": self.remat,
        }
        return import_module("benchmarks.request").Request(
            small=self.small,
            targets=steps or None,
            args=self.args,
            settings=parse_settings(self.settings or ()),
            meshes=tuple(self.meshes or ()) or None,
            cluster=self.cluster,
            methods=tuple(self.methods or ()),
            options={name: x for name, x in options.items() if x is not None},
            tables=tables,
            rounds=self.rounds,
            num_devices=num_devices,
        )


def run_suites(suites: Sequence[str], asked: Asked) -> None:
    """Runs suites and prints a table of each; files are written at the end.

    What was found is kept, too, where a key is pressed (Ctrl-C), or cases fail.

    Raises:
      ValueError: something unknown is named, or a file cannot be read or written.
      typer.Exit: with 1 if a case failed or a number got worse, 130 if a key was
        pressed.
    """
    module, results = map(import_module, ("benchmarks.suites", "benchmarks.results"))
    for path in filter(None, (asked.json, asked.html)):
        _check_writable(path)
    kept = None if asked.against is None else results.ResultFile.load(asked.against)
    _use_no_cache()
    num_devices, kind = _devices(asked.devices)
    request = asked.request(num_devices)
    for name in request.targets or ():
        request.find(name)  # mistakes are told before anything runs
    found: list[Any] = []
    is_stopped = False
    try:
        with _ended_alike() as check, _listener() as listener:
            for result in module.run(suites or tuple(module.SUITES), request, listener):
                found.append(result)
                check()
    except KeyboardInterrupt:
        is_stopped = True
        print(f"stopped: {len(found)} results were there", file=sys.stderr)
    origin = results.Origin.here(shlex.join(["autopar", *sys.argv[1:]]))
    file = results.ResultFile(results.Machine.here(kind), tuple(found), origin)
    comparison = None
    if kept is not None and found:
        comparison = import_module("benchmarks.comparison").compare(kept, file)
    _write(file, comparison, asked)
    if comparison is not None:
        print(comparison)
    if is_stopped:
        raise typer.Exit(_INTERRUPTED)
    if any(each.failure for each in found) or (comparison and comparison.is_worse):
        raise typer.Exit(1)


def judge_files(before: Path, after: Path) -> None:
    """Prints what changed between two files; exit code 1 if anything got worse."""
    results = import_module("benchmarks.results")
    files = [results.ResultFile.load(path) for path in (before, after)]
    comparison = import_module("benchmarks.comparison").compare(*files)
    print(comparison)
    if comparison.is_worse:
        raise typer.Exit(1)


def _write(file: Any, comparison: Any, asked: Asked) -> None:
    if asked.json is not None:
        file.save(asked.json)
        print(f"written to {asked.json}")
    if asked.html is not None:
        page = import_module("benchmarks.result_page").page(file, comparison)
        asked.html.write_text(page)
        print(f"written to {asked.html}")


@contextmanager
def _listener() -> Iterator[Any]:
    """Tables on stdout; what runs on stderr, as a line that moves on a terminal."""
    tables = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    status = progress.status("starting") if progress.is_terminal else None

    def starts(suite: str, case: str, number: int, total: int) -> None:
        text = f"{suite} {number}/{total}: {case}"
        if status is not None:
            status.update(text)
        else:
            progress.print(text, markup=False)

    def ends(suite: str, found: Sequence[Any]) -> None:
        if found:
            module = import_module("benchmarks.result_tables")
            tables.print(module.suite_table(suite, found))
            tables.print()

    with status or nullcontext():
        yield import_module("benchmarks.suites").Listener(starts=starts, ends=ends)


@contextmanager
def _ended_alike() -> Iterator[Callable[[], None]]:
    """SIGTERM, such as of `timeout`, is as a key pressed: what was found is kept.

    Gives what to call now and then: where code swallowed the interrupt, it comes again.
    A second signal ends the process.
    """
    got: list[int] = []

    def stop(number: int, _: Any) -> None:
        got.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    def check() -> None:
        if got:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)


def _use_no_cache() -> None:
    """Times are those of work, not of reading what an earlier run kept."""
    import jax

    from autopar.cache_folder import VARIABLE

    os.environ[VARIABLE] = "off"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # of processes started here
    jax.config.update("jax_enable_compilation_cache", False)


def _devices(text: str) -> tuple[int, str]:
    """How many devices there are to run on, and what they are.

    Raises:
      ValueError: neither a number nor `here`.
    """
    if text == _HERE:
        import jax

        devices = jax.devices()
        return len(devices), f"{len(devices)} {devices[0].device_kind}"
    if not text.isdecimal():
        raise ValueError(
            f"--devices must be a number of virtual CPU devices, or 'here' for those "
            f"of this machine, but got {text!r}; 8 is a good number."
        )
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(int(text))
    return int(text), "virtual CPU devices"


def _check_writable(path: Path) -> None:
    """Before anything runs, which may take long.

    Raises:
      ValueError: the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"results are written to a folder that is there, but that of {path} is "
            f"not; make it first."
        )
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"results must be written to a file, but {path} cannot be: "
            f"{error.strerror}; name another."
        ) from None
    if is_new:
        path.unlink()
