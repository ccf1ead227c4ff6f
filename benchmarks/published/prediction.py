"""A published table beside its prediction: every cell, and the columns' errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.published.columns import Cell
from benchmarks.published.simulator import Outcome
from benchmarks.published.systems import predict
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
class PredictedTable:
    """All cells of a table."""

    name: str
    cells: tuple[PredictedCell, ...]

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
    table: Table, *, tell: Callable[[str], None] = lambda text: None
) -> PredictedTable:
    """Every cell of a table; `tell` gets a line behind each row."""
    cells: list[PredictedCell] = []
    for place, row in enumerate(table.rows):
        here = [_cell(row, cell, predict(cell.column, row)) for cell in row.cells]
        cells += here
        which = f"{table.name}, row {place + 1} of {len(table.rows)}"
        tell(f"{which}: {', '.join(map(str, here))}")
    return PredictedTable(table.name, tuple(cells))


def _cell(row: Row, cell: Cell, outcome: Outcome | None) -> PredictedCell:
    predicted = row.tflops(outcome.seconds) if outcome else None
    plan = str(outcome.plan) if outcome else "nothing fits"
    return PredictedCell(
        row.num_gpus, cell.column, cell.tflops, cell.is_projected, predicted, plan
    )
