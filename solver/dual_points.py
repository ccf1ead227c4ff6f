"""Bounds that prices on memory gave, kept for other budgets and for rows lowered since.

At prices m the bound is  base - sum_r m_r budget  for every budget. Where row r says
less than it did, by at most l_r of any assignment, the base is sum_r m_r l_r lower.
Rows that came later have no price there: they only raise what fits.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from .memory_rows import MemoryRow


class DualPoints:
    """Prices [rows] that were tried, and what they bound."""

    def __init__(self) -> None:
        self._rows: list[MemoryRow] = []
        self._points: list[tuple[np.ndarray, float]] = []  # prices and base

    def follow(self, rows: Sequence[MemoryRow]) -> None:
        """Takes rows as they now are: those known come first, perhaps lowered."""
        known, self._rows = self._rows, list(rows)
        if len(rows) < len(known):
            self._points.clear()
        pairs = zip(known, rows, strict=False)
        lost = np.array([most_lowered(old, new) for old, new in pairs])
        if lost.any():
            self._points = [(m, b - _paid(m, lost)) for m, b in self._points]

    def add(self, prices: np.ndarray, bound: float, budget: float) -> None:
        """A bound at prices [rows] and a budget."""
        self._points.append((prices, bound + float(prices.sum()) * budget))

    def best(self, budget: float) -> tuple[np.ndarray, float]:
        """The prices [rows] of the highest bound at a budget, and it (or -inf)."""
        best, bound = np.zeros(len(self._rows)), -inf
        for prices, base in self._points:
            value = base - float(prices.sum()) * budget
            if value > bound:
                best, bound = prices, value
        return np.pad(best, (0, len(self._rows) - best.size)), bound

    def __str__(self) -> str:
        return f"DualPoints: {len(self._points)} prices, {len(self._rows)} rows"


def most_lowered(old: MemoryRow, new: MemoryRow) -> float:
    """By how much `new` says less at most; inf where it is no row on the same nodes."""
    if old is new:
        return 0.0
    if old.nodes != new.nodes:
        return inf
    less = old.constant - new.constant
    for before, after in zip(old.weights, new.weights, strict=True):
        if before is not after:
            less += float((before - after).max())
    return less


def _paid(prices: np.ndarray, lost: np.ndarray) -> float:
    has_price = np.flatnonzero(prices[: lost.size])
    return float(prices[has_price] @ lost[has_price])
