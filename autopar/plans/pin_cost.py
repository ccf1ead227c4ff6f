"""What pins cost, as data that prints itself."""

from __future__ import annotations

from dataclasses import dataclass


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
        width = max(len(cost.pin) for cost in self.costs)
        lines = [
            f"{'pin':{width}}  {'with it':>12}  {'without it':>12}  {'it costs':>12}"
        ]
        for cost in self.costs:
            part = cost.seconds / self.step_seconds if self.step_seconds else 0.0
            lines.append(
                f"{cost.pin:{width}}  {cost.step_seconds * 1e6:>9.1f} us  "
                f"{cost.seconds_without * 1e6:>9.1f} us  "
                f"{cost.seconds * 1e6:>9.1f} us ({part:.1%})"
            )
        return "\n".join(lines)
