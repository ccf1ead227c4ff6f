"""A published table beside its prediction: every cell, and the columns' errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.published.columns import Cell
from benchmarks.published.simulator import Outcome, Plan
from benchmarks.published.systems import our_best, predict
from benchmarks.published.table import Row, Table


@dataclass(frozen=True)
class PredictedCell:
    """A number as it was published and as predicted, in Tflop/s a GPU.

    None: it ran out of memory, or nothing is predicted to fit. `plan` is the one that
    was given, or the fastest that the search found.
    """

    num_gpus: int
    column: str
    published: float | None
    is_projected: bool
    predicted: float | None
    plan: str

    @property
    def error(self) -> float:
        """Relative; 1 where only one of the two ran out of memory."""
        if self.published is None or self.predicted is None:
            return float(self.published is not self.predicted)
        return self.predicted / self.published - 1

    def __str__(self) -> str:
        predicted, published = map(number_text, (self.predicted, self.published))
        return f"{self.column} {predicted} ({published})"


def number_text(value: float | None) -> str:
    """A number as it is shown; None is what ran out of memory."""
    return "OOM" if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class OurPlan:
    """The fastest plan of our own search beside another, in the same simulator.

    The other is Alpa's, or in a table without it that of the first column, `column`.
    """

    num_gpus: int
    column: str
    their_seconds: float | None
    our_seconds: float
    plan: str
    changes: str

    @property
    def ratio(self) -> float | None:
        """How many times as fast."""
        return self.their_seconds / self.our_seconds if self.their_seconds else None

    def __str__(self) -> str:
        ours, theirs = map(number_text, (self.our_seconds, self.their_seconds))
        return f"{ours} s ({theirs}): {self.plan}"


@dataclass(frozen=True)
class PredictedTable:
    """All cells of a table; `ours` is empty where it was not asked for."""

    name: str
    cells: tuple[PredictedCell, ...]
    ours: tuple[OurPlan, ...] = ()

    def measured(self, column: str | None = None) -> list[PredictedCell]:
        """Cells that were measured, of one column or of all."""
        return [
            cell
            for cell in self.cells
            if not cell.is_projected and column in (None, cell.column)
        ]

    def error(self, column: str | None = None) -> float:
        """Mean absolute relative error of the measured cells."""
        return float(np.mean([abs(cell.error) for cell in self.measured(column)]))

    def constant_error(self, column: str | None = None) -> float:
        """The error of the best constant guess for the same cells."""
        published = [cell.published for cell in self.measured(column)]
        numbers = np.array([number for number in published if number is not None])
        if not len(numbers):
            return 1.0
        # A mean of |c / v - 1| is least at one of the numbers themselves.
        missing = len(published) - len(numbers)
        errors = abs(numbers[:, None] / numbers - 1).sum(axis=1) + missing
        return float(errors.min() / len(published))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))


def predict_table(
    table: Table,
    *,
    with_ours: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> PredictedTable:
    """Every cell of a table, and our own plan for every row if asked for.

    `tell` gets a line before and behind each row and each search.
    """
    cells: list[PredictedCell] = []
    ours: list[OurPlan] = []
    for place, row in enumerate(table.rows):
        which = f"{table.name}, row {place + 1} of {len(table.rows)}"
        tell(f"{which}: {row.num_gpus} GPUs")
        found = {
            cell.column: predict(cell.column, row)
            for cell in row.cells
        }
        here = [_cell(row, cell, found[cell.column]) for cell in row.cells]
        cells += here
        tell(f"{which}: {', '.join(map(str, here))}")
        if with_ours:
            tell(f"{which}: {row.num_gpus} GPUs, a plan of our own")
            new = _ours(row, found)
            ours += new
            tell(f"{which}: {', '.join(map(str, new))}")
    return PredictedTable(table.name, tuple(cells), tuple(ours))


def _cell(row: Row, cell: Cell, outcome: Outcome | None) -> PredictedCell:
    predicted = row.tflops(outcome.simulated_seconds) if outcome else None
    plan = str(outcome.plan) if outcome else "nothing fits"
    return PredictedCell(
        row.num_gpus, cell.column, cell.tflops, cell.is_projected, predicted, plan
    )


def _ours(row: Row, found: Mapping[str, Outcome | None]) -> list[OurPlan]:
    best = our_best(row)
    if best is None or not found:
        return []
    column = "alpa" if "alpa" in found else next(iter(found))
    other = found[column]
    theirs = other.simulated_seconds if other else None
    if other is not None and other.simulated_seconds <= best.simulated_seconds:
        best = other
    return [
        OurPlan(
            *(row.num_gpus, column, theirs, best.simulated_seconds, str(best.plan)),
            _changes(other, best),
        )
    ]


def _changes(other: Outcome | None, ours: Outcome) -> str:
    """What is not as in another plan: ours, then theirs in brackets."""
    if other is None:
        return "theirs does not fit"
    pairs = zip(_traits(ours.plan), _traits(other.plan), strict=True)
    found = [
        f"{name}: {new} ({old})"
        for (name, new), (_, old) in pairs
        if new != old and new and old
    ]
    return "; ".join(found) or "nothing"


def _traits(plan: Plan) -> list[tuple[str, str]]:
    """What a plan is, by name; nothing where one stage has no such trait."""
    balance = "flops" if plan.system.balances_flops else "seconds"
    balance = "layers" if plan.system.has_equal_stages else balance
    shapes = dict.fromkeys(f"{x.data}x{x.tensor}" for x in plan.layouts)
    sizes = dict.fromkeys(str(x.size) for x in plan.layouts)
    return [
        ("schedule", plan.schedule if len(plan.layouts) > 1 else "no pipeline"),
        ("remat", plan.system.remat),
        ("stages", f"{len(plan.stages)} on {len(plan.layouts)} submeshes"),
        ("equal in", balance if len(plan.layouts) > 1 else ""),
        ("GPUs a submesh", ", ".join(sizes)),
        ("data x tensor", ", ".join(shapes)),
        ("microbatches", str(plan.num_microbatches)),
    ]
