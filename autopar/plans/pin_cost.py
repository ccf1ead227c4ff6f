"""What pins cost, as data that prints itself."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from .explain import as_text, table


@dataclass(frozen=True)
class PinCost:
    """Seconds of a step with all pins, and with all but this one.

    `pin` is its key among `pins` of `parallelize`, or the line of an `autopar.pin`.
    """

    pin: str
    step_seconds: float
    seconds_without: float

    @property
    def seconds(self) -> float:
        """What the pin adds to a step; nothing if the solver would do the same."""
        return max(0.0, self.step_seconds - self.seconds_without)


@dataclass(frozen=True)
class PinCosts:
    """The cost of every pin, the dearest first; prints as a table.

    Costs do not add up: of two pins that ask for the same, neither costs anything.
    """

    step_seconds: float
    costs: tuple[PinCost, ...]

    def __str__(self) -> str:
        if not self.costs:
            return "no pins"
        rows = table("pin", ">with it", ">without it", ">it costs")
        for cost in self.costs:
            part = cost.seconds / self.step_seconds if self.step_seconds else 0.0
            seconds = cost.step_seconds, cost.seconds_without, cost.seconds
            first, second, third = (f"{each * 1e6:.1f} us" for each in seconds)
            rows.add_row(Text(cost.pin), first, second, f"{third} ({part:.1%})")
        return as_text([rows])
