"""The rows of memory that plans met have brought, and what they say of others.

A row is exact of the plan that brought it. Of others it may say too much, as copies
that several readers make, or arguments whose memory is free, are told in full. What it
says too much of a plan that was met is taken off; of plans that were not met nobody
knows, so they may be doubted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.memory_rows import MemoryRow, lowered_by_all

from .met_plan import MetPlan

WORTH_LOWERING = 0.005  # of what a plan holds, that a row says more of it


@dataclass(frozen=True, eq=False)
class _Row:
    """A row, packed or not, and the choices of the plan that brought it."""

    row: MemoryRow
    own: tuple[int, ...]
    is_packed: bool = False

    def doubted(self, part: float) -> MemoryRow:
        """The row, which of choices that are not its own plan's says a part less."""
        own = np.array(self.own, np.intp)[self.row.index].tolist()
        known: dict[tuple[int, int], np.ndarray] = {}
        weights = []
        for held, choice in zip(self.row.weights, own, strict=True):
            key = id(held), choice
            if key not in known:
                known[key] = held * (1 - part)
                known[key][choice] = held[choice]
            weights.append(known[key])
        return MemoryRow(self.row.nodes, tuple(weights), self.row.constant)


class MetRows:
    """Rows, in the order in which they came.

    `sizes` [nodes] is how many choices each has. No row keeps a plan of which at most
    `limit_bytes` were met to be live, or needed if packed, from being one within them.
    """

    def __init__(self, sizes: Sequence[int], limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._sizes = sizes
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, *, packed: bool) -> list[MemoryRow]:
        """What is live, and what is needed, too, if packed."""
        return [each.row for each in self._rows if packed or not each.is_packed]

    def doubted(self, part: float) -> list[MemoryRow]:
        """All rows, saying a part less of choices that are not their own plan's."""
        return [each.doubted(part) for each in self._rows]

    def packed_of(self) -> set[tuple[int, ...]]:
        """The plans that brought packed rows, by their choices."""
        return {each.own for each in self._rows if each.is_packed}

    def add(
        self,
        found: MetPlan,
        rows: Iterable[MemoryRow],
        met: Collection[MetPlan],
        *,
        packed: bool = False,
    ) -> None:
        """Adds rows of a plan, lowered by plans met."""
        added = (_Row(row, found.choices, packed) for row in rows)
        self._rows += [self._lowered(each, met) for each in added]

    def lower(self, met: Collection[MetPlan], latest: MetPlan) -> float:
        """Lowers rows that say too much of a plan met; by how much of the latest."""
        before = self._rows
        self._rows = [self._lowered(each, met) for each in self._rows]
        choices = latest.array
        return max(
            old.row.used(choices) - new.row.used(choices)
            for old, new in zip(before, self._rows, strict=True)
        )

    def _lowered(self, given: _Row, met: Collection[MetPlan]) -> _Row:
        row, packed = given.row, given.is_packed
        refuting = [
            (each.choices, each.bytes(packed=packed))
            for each in met
            if self._says_too_much(row.used(each.array), each.bytes(packed=packed))
        ]
        if not refuting:
            return given
        return replace(given, row=lowered_by_all(row, given.own, refuting, self._sizes))

    def _says_too_much(self, said: float, held_bytes: int) -> bool:
        is_refuted = said > self.limit_bytes >= held_bytes
        return is_refuted or said > (1 + WORTH_LOWERING) * held_bytes

    def __str__(self) -> str:
        return f"MetRows: {len(self._rows)} of {len({x.own for x in self._rows})} plans"
