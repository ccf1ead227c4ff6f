"""Published throughput, predicted with the product's costs of kernels and collectives.

Reads tables as they are: of Tflop/s by system, as the Alpa paper's (docs/cost_model.md
has the form), TorchTitan's, Megatron-Bridge's and MaxText's (one run a distinct
configuration). What a system ran is simulated: the plan that was published, else the
best of its search in the same simulator. Nothing is fitted on rows of these tables.

    python -m benchmarks.published_tables benchmarks/published/*.csv
    python -m benchmarks.published_tables --data DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.published.runs import Run


def paths_of(tables: Sequence[Path], folder: Path | None) -> list[Path]:
    """Tables that are named, those of a folder, or those at hand; by name, each once.

    Tables of measured kernels (`xla_*`) are none of runs.
    """
    found = list(tables)
    if folder is not None:
        found += [path for path in folder.glob("*.csv") if path.stem[:4] != "xla_"]
    if not found:
        found = list((Path(__file__).parent / "published").glob("*.csv"))
    return sorted({path.name: path for path in found}.values())


def number_text(value: float | None) -> str:
    """A number as it is shown; None is what ran out of memory."""
    return "OOM" if value is None else f"{value:,.4g}"


def print_table(name: str, runs: Sequence[Run]) -> None:
    """Every run, then the errors of each kind."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.published.runs import constant_error, error_of

    console = Console(width=150)
    shown = Table(title=f"{name}: {runs[0].unit} of one device")
    for column in ("run", "published", "predicted", "error", "plan", "not scored"):
        shown.add_column(column, justify="right" if "ed" in column[-2:] else "left")
    for run in runs:
        config = " ".join(
            f"{key} {value}" for key, value in run.config.items() if value
        )
        shown.add_row(
            f"{' '.join(run.group)}: {config}",
            *(number_text(run.published), number_text(run.predicted)),
            *(f"{run.error:+.1%}" if run.simulator else "", run.plan, run.reason),
        )
    console.print(shown)
    errors = Table(title="mean absolute relative error")
    for column in ("runs of", "number", "error", "best constant", "not scored"):
        errors.add_column(column)
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in filter(lambda run: run.simulator, runs):
        kinds.setdefault((run.kind, run.reason), []).append(run)
        if not run.reason:
            kinds.setdefault(("all that is scored", ""), []).append(run)
    for (kind, reason), same in sorted(kinds.items()):
        row = str(len(same)), f"{error_of(same):.1%}", f"{constant_error(same):.1%}"
        errors.add_row(kind, *row, reason)
    console.print(errors)


def records_of(runs: Iterable[Run]) -> list[dict[str, object]]:
    """Runs as they are written to a file."""
    return [
        {
            **{"table": run.table, "kind": run.kind, "config": dict(run.config)},
            **{"published": run.published, "predicted": run.predicted},
            **{"unit": run.unit, "plan": run.plan, "reason": run.reason},
        }
        for run in runs
    ]


def main() -> None:
    from benchmarks.published.runs import read_runs

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, help="CSV files")
    parser.add_argument("--data", type=Path, help="a folder of tables")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    arguments = parser.parse_args()
    records: list[dict[str, object]] = []
    for path in paths_of(arguments.tables, arguments.data):
        runs = read_runs(path)
        print_table(path.stem, runs)
        records += records_of(runs)
        print(f"{process_time():7.1f} s  {path.stem}", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
