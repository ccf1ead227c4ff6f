"""Bounds that solutions proved, for as long as their rows of memory stay.

A row that is lowered is another row: what was proved with the old one is no bound on
the plans that the new one admits. Rows that come only exclude plans, so bounds stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.solver.lagrangian import PricedPlans
from autopar.solver.memory_rows import MemoryRow


@dataclass(frozen=True, eq=False)
class _Proved:
    """No plan that no row puts above `limit` bytes costs less than `bound` seconds."""

    bound: float
    limit: float
    rows: tuple[MemoryRow, ...]

    def holds(self, rows: set[int], limit: float) -> bool:
        """Whether it is one on the plans within a limit by some rows (their ids)."""
        return limit <= self.limit and rows.issuperset(map(id, self.rows))

    def admits(self, choices: Sequence[int]) -> bool:
        return all(row.used(choices) <= self.limit for row in self.rows)


class ProvedBounds:
    """What was proved of one problem: by whole solutions, and by `priced` at prices."""

    def __init__(self, priced: PricedPlans) -> None:
        self._priced = priced
        self._all: list[_Proved] = []

    def add(self, bound: float, limit: float, rows: Sequence[MemoryRow]) -> None:
        """Keeps a bound in seconds on the plans that no row puts above a limit."""
        self._all.append(_Proved(bound, limit, tuple(rows)))

    def of(
        self,
        limit: float,
        rows: Sequence[MemoryRow],
        admitted: Sequence[int] | None = None,
    ) -> float:
        """The greatest bound on plans that no row puts above a limit, -inf if none.

        `admitted` is a plan that fits whatever rows say of it: a bound with rows that
        it breaks is none of the problem that the plan is of. At prices such rows may
        come to what it holds by them.
        """
        here = set(map(id, rows))
        whole = (
            each.bound
            for each in self._all
            if each.holds(here, limit) and (admitted is None or each.admits(admitted))
        )
        priced = self._priced.known_bound(rows, limit, admitted)
        return max(priced, max(whole, default=-math.inf))

    def __str__(self) -> str:
        return f"ProvedBounds: {len(self._all)} of whole solutions"
