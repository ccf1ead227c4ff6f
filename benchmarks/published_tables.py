"""Published throughput tables, predicted with the project's own solver and cost model.

Reads CSV files as those of the Alpa paper (OSDI 2022) were published: a row a model and
a number of GPUs, a column a system, in Tflop/s a GPU (docs/cost_model.md has the form).
What a system ran is simulated: the plan where it was published, else the best of its
search in the same simulator. Three constants of V100s were fitted on GPT rows (`--fit`
writes them); nothing was fitted on the tables in `held_out`.

    python -m benchmarks.published_tables benchmarks/published/*.csv
    python -m benchmarks.published_tables benchmarks/published/*.csv --ours
    python -m benchmarks.published_tables benchmarks/published/alpa_osdi22_gpt.csv --fit
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.published.prediction import PredictedTable


def run(
    paths: Sequence[Path],
    *,
    with_ours: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[PredictedTable]:
    """Each table, predicted with the constants of its machine.

    V100s have those in `benchmarks/published/v100.json`, others their preset's.
    `tell` gets a line before and behind each row and each search.
    """
    from benchmarks.published.constants import Constants
    from benchmarks.published.prediction import predict_table, simulators_of
    from benchmarks.published.table import read_table

    found = []
    for path in paths:
        table = read_table(path)
        constants = Constants.of_kind(table.setting.kind)
        simulators = simulators_of(table, constants)
        found.append(
            predict_table(table, simulators, constants, with_ours=with_ours, tell=tell)
        )
    return found


def fit_and_write(path: Path) -> None:
    """Fits the constants on one table of GPTs and writes them with their errors.

    The same table gives the same file: the search has no random part.

    Raises:
      ValueError: the table has other models, which are there to be predicted.
    """
    from benchmarks.published import constants as file
    from benchmarks.published.fit import START
    from benchmarks.published.prediction import (
        fitted,
        leave_one_out,
        predict_table,
        simulators_of,
    )
    from benchmarks.published.table import read_table

    table = read_table(path)
    others = {row.model.name for row in table.rows} - {"gpt"}
    if others:
        raise ValueError(
            f"constants are fitted on rows of GPTs alone, but {path} has rows of "
            f"{', '.join(sorted(others))}; give alpa_osdi22_gpt.csv."
        )
    simulators = simulators_of(table, START)
    constants = fitted(table, simulators, START)
    found = predict_table(table, simulators, constants)
    record = {
        "command": f"python -m benchmarks.published_tables {path} --fit",
        "constants": constants.fitted(),
        "error": round(found.error(), 4),
        "leave_one_out_error": round(leave_one_out(table, simulators, constants), 4),
        "constant_guess_error": round(found.constant_error(), 4),
    }
    file.FILE.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def print_table(found: PredictedTable) -> None:
    """Every cell, then the errors, then our own plans."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.published.prediction import number_text

    console = Console(width=120)
    shown = Table(title=f"{found.name}: Tflop/s a GPU (* projected by the authors)")
    for name in ("GPUs", "column", "published", "predicted", "error", "plan"):
        shown.add_column(
            name, justify="left" if name in ("column", "plan") else "right"
        )
    for cell in found.cells:
        star = "*" if cell.is_projected else ""
        shown.add_row(
            *(str(cell.num_gpus), cell.column, f"{number_text(cell.published)}{star}"),
            *(number_text(cell.predicted), f"{cell.error:+.1%}", cell.plan),
        )
    console.print(shown)
    errors = Table(title="mean absolute relative error, projected cells left out")
    for name in ("column", "cells", "predicted", "best constant"):
        errors.add_column(name, justify="left" if name == "column" else "right")
    for column in (*found.columns, None):
        if found.measured(column):
            errors.add_row(
                *(column or "all", str(len(found.measured(column)))),
                f"{found.error(column):.1%}",
                f"{found.constant_error(column):.1%}",
            )
    console.print(errors)
    if found.ours:
        console.print(_our_table(found))


def _our_table(found: PredictedTable) -> object:
    from rich.table import Table

    from benchmarks.published.prediction import number_text

    column = found.ours[0].column
    shown = Table(title=f"our plan beside that of {column}, both simulated")
    for name in ("GPUs", f"{column} s", "ours s", "times as fast", "changed", "plan"):
        shown.add_column(
            name, justify="left" if name in ("changed", "plan") else "right"
        )
    for each in found.ours:
        shown.add_row(
            *(str(each.num_gpus), number_text(each.their_seconds)),
            *(
                number_text(each.our_seconds),
                number_text(each.ratio),
                each.changes,
                each.plan,
            ),
        )
    return shown


def _tell(text: str) -> None:
    """Progress, with the CPU seconds so far; standard output has the tables alone."""
    print(f"{process_time():7.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", nargs="+", type=Path, help="CSV files")
    parser.add_argument("--ours", action="store_true", help="search plans of our own")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    parser.add_argument("--json", type=Path, help="write the cells to this file")
    arguments = parser.parse_args()
    if arguments.fit:
        fit_and_write(arguments.tables[0])
        return
    found = run(arguments.tables, with_ours=arguments.ours, tell=_tell)
    for each in found:
        print_table(each)
    if arguments.json:
        records = [asdict(each) for each in found]
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
