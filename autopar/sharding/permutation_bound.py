"""What a path with an exchange of whole shards costs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import prod

from .placement import Step

_ROUNDING = 1.0 - 1e-9  # sums of seconds in another order


@dataclass(frozen=True)
class PermutationBound:
    """Seconds of the cheapest links: to begin, and for all bytes of the tensor.

    `permuted` are those of sending it, `gathered` of bringing the parts together.
    """

    begin: float
    permuted: float
    gathered: float

    @classmethod
    def of(
        cls, sizes: tuple[int, ...], price: Callable[[Step], float]
    ) -> PermutationBound:
        """That of a mesh with axes of these sizes, where steps have this price."""
        axes = range(len(sizes))
        permutes = [Step("collective_permute", (axis,), 0.0) for axis in axes]
        gathers = [
            Step("all_gather", chosen, 0.0)
            for count in axes
            for chosen in combinations(axes, count + 1)
            if prod(sizes[axis] for axis in chosen) > 1
        ]

        def slope(step: Step) -> float:
            return price(Step(step.kind, step.axes, 1.0)) - price(step)

        gathered = [
            slope(step) / (1.0 - 1.0 / prod(sizes[axis] for axis in step.axes))
            for step in gathers
        ]
        return cls(
            _ROUNDING * min(map(price, permutes)),
            _ROUNDING * min(map(slope, permutes)),
            _ROUNDING * min(gathered, default=0.0),
        )

    def permutation(self, fraction: float) -> float:
        """Of exchanging shards that are this part of the tensor, or more."""
        return self.begin + self.permuted * fraction

    def path(self, finest: float, goal: float) -> float:
        """Of exchanging shards and bringing them together to the goal's.

        Args:
          finest: the least part of the tensor that a shard is where it is exchanged.
          goal: the part that a shard is in the end.
        """
        more = min(self.permuted, self.gathered) * max(0.0, goal - finest)
        return self.permutation(finest) + more
