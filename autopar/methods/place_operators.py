"""`autopar.PlaceOperators`: every operator on one device, none of them split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from ..option_values import MicrobatchSemantics
from ..plans.staged_plan import PLACED

ALGORITHMS = ("auto", "exact", "search", "list", "topological", "small_communication")


@dataclass(frozen=True)
class PlaceOperators:
    """Operator placement: each operator whole on one device, values sent between them.

    For graphs whose parts run beside each other. The next value of state is made where
    the leaf lives, with the optimizer's state of its shape; everything a device makes
    or holds counts against its memory for the whole step.

    Args:
      algorithm: "exact" (integer program, for a dozen operators), "search" (simulated
        annealing from the best heuristic), "list" (earliest finish time), "topological"
        (fill device after device), "small_communication", or "auto": exact for few
        operators, else a search.
      devices: the device of operators and leaves, by regular expression found in
        their name or path; device 0 is the first.
      together: expressions; what one of them is found in shares a device.
      speeds: how fast each device is, relative to the cluster's; all 1 if left out.
      seed: of the search; the same seed gives the same placement.

    Raises:
      ValueError: an unknown algorithm, or a speed that is not positive.
    """

    algorithm: str = "auto"
    devices: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[str] = ()
    speeds: Sequence[float] | None = None
    seed: int = 0

    # A placed step is a pipeline of one microbatch, with a stage on every device.
    num_microbatches = 1
    microbatch_semantics: MicrobatchSemantics = "exact"
    schedule = PLACED
    stage_products = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"`algorithm` must be one of {', '.join(ALGORITHMS)}, but got "
                f"{self.algorithm!r}."
            )
        for speed in self.speeds or ():
            if not (speed > 0 and isfinite(speed)):
                raise ValueError(
                    f"`speeds` are positive numbers, but got {speed!r}; 0.5 is half as "
                    f"fast as the cluster's devices."
                )
