"""How much may be live at once, where what is live takes more than that."""

from __future__ import annotations

WORTH_A_SEARCH = 0.005  # of the budget


class LiveLimit:
    """The bytes that may be live, narrowed until what is found fits a budget.

    Between a limit with which nothing more is found that fits, `_low`, and what is live
    of the plan found that takes too much, `_high`.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.bytes = self._high = self._budget_bytes = budget_bytes
        self._low = 0

    @property
    def is_settled(self) -> bool:
        """Whether what is left between both is not worth another search."""
        return self._high - self._low <= WORTH_A_SEARCH * self._budget_bytes

    def lower(self, live_bytes: int, peak_bytes: int) -> None:
        """So far that a plan would fit whose parts lie as those of the one found.

        Of that `live_bytes` are live, and it takes `peak_bytes`, above the budget.
        """
        self._high = live_bytes
        alike = self._budget_bytes * live_bytes // peak_bytes
        self.bytes = max(alike, (self._low + self._high) // 2)

    def raise_again(self) -> None:
        """Half way to what was too much."""
        self._low = self.bytes
        self.bytes = (self._low + self._high) // 2

    def start_at(self, live_bytes: int) -> None:
        """Goes on from what is live of a plan that fits."""
        self.bytes, self._low = live_bytes, 0
        self._high = max(self._high, live_bytes)
