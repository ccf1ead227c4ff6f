"""A planner whose plans take what is given for the sizes of a mesh's axes."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from autopar.errors import InfeasiblePlanError
from autopar.planner.intra_op import IntraOpSolution
from autopar.sharding.mesh import MeshShape


@dataclass
class Planner:
    """Plans whose seconds are given by sizes; the bound is `looseness` below them.

    A bound at the cutoff leaves a wide gap.
    """

    seconds: dict[tuple[int, ...], float]
    other: float = 9.0
    looseness: float = 0.0
    needs: tuple[int, int, int] = (90, 60, 30)
    is_searched: bool = False

    def __post_init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], float]] = []
        self.cutoffs: list[float] = []

    def __call__(self, mesh: MeshShape, gap: float, cutoff: float) -> IntraOpSolution:
        self.asked.append((mesh.axis_sizes, gap))
        self.cutoffs.append(cutoff)
        seconds = self.seconds.get(mesh.axis_sizes, self.other)
        if seconds == np.inf:
            least = self.needs[mesh.num_axes - 1]
            raise InfeasiblePlanError(f"{mesh}", least)
        plan = SimpleNamespace(
            mesh=mesh, predicted=SimpleNamespace(step_seconds=seconds)
        )
        bound = seconds - self.looseness
        is_ended = bound >= cutoff
        gap = 0.3 if is_ended else gap if gap > 1e-3 else 0.0
        found = SimpleNamespace(bound=bound, gap=gap)
        return IntraOpSolution(cast(Any, plan), cast(Any, found), self.is_searched)

    @property
    def shapes_asked(self) -> list[tuple[int, ...]]:
        return [sizes for sizes, _ in self.asked]
