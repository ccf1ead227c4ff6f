"""Which logical mesh to plan on, where the user names none: shapes are searched.

The search starts from one axis (from more, if no plan fits on one), and goes on from
the best shape so far to its neighbours (an axis cut in two, or a cut moved) while a
step pays. Near the floor an axis is cut at one place only, between the levels or else
near its middle. Neighbours are solved with a loose gap, and not at all where a bound
says that they cannot pay:

  floor     what the operators take if every device does an equal part, and nothing is
            sent: no shape goes below it
  refined   a shape can do all that a coarser one can (its cuts and more), so the bound
            of the one holds for the other
  cutoff    what a shape must stay below to be taken: its solution ends as soon as its
            own bound is that high, with whatever plan there is by then
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds, total_flops
from ..errors import InfeasiblePlanError
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import OpGraph
from ..plans.explain import format_seconds
from ..plans.plan import TriedPlan
from ..sharding.mesh import MeshShape
from .intra_op import IntraOpSolution
from .mesh_shapes import MAX_AXES, is_refined_by, neighbours
from .strategies import SLICING

WORTH = 0.005
"""The part of a step's time that a shape must save to be taken over a simpler one."""

FAR = 1.25
"""How many times the floor a step takes where much may still be gained."""

HELPS = 0.9
"""What the least budget must fall to where a finer shape is worth a try."""

MOST_SEARCHED = 3
"""Shapes on which plans are searched for within a budget, which takes long."""

SMALLEST = 4
"""The least size of each of three axes with equal links: these take long to solve."""

LOOSE_GAP = 0.005
TIGHT_GAP = 1e-4
MANY_OPERATORS = 1_500  # from which on a step is long
_log = logging.getLogger("autopar")

_T = TypeVar("_T")
Asking: TypeAlias = Generator[tuple[MeshShape, float, float], IntraOpSolution, _T]
"""Asks for plans on a shape within a gap, any as soon as its bound is the cutoff in
seconds; is sent the plan, or thrown the `InfeasiblePlanError`."""


@dataclass(frozen=True)
class SearchLimits:
    """What a search of meshes need not look at.

    Attributes:
      floor_seconds: no shape's plan takes less; see `least_seconds`.
      cutoff: plans of so many seconds are of no use: where no shape has a better one,
        the plan is any and need not fit.
      is_long: three axes take long to solve, so their plan keeps the loose gap.
    """

    floor_seconds: float = 0.0
    cutoff: float = math.inf
    is_long: bool = False


NO_LIMITS = SearchLimits()


@dataclass(frozen=True)
class Trial:
    """A shape, what a step takes on it, and the bound; infinite where nothing fits.

    `is_ended`: the solution was ended, its bound being above the cutoff; `seconds` are
    then the bound.
    """

    mesh: MeshShape
    seconds: float = math.inf
    bound_seconds: float = math.inf
    solution: IntraOpSolution | None = None
    error: InfeasiblePlanError | None = None
    is_ended: bool = False

    @property
    def is_searched(self) -> bool:
        """Whether memory binds, so that a plan was searched for within the budget."""
        return self.solution is None or self.solution.is_searched

    @property
    def cutoff(self) -> float:
        """Seconds that another shape must stay below."""
        return self.seconds * (1 - WORTH)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.mesh} does not fit"
        over = "over " if self.is_ended else ""
        return f"{self.mesh} {over}{format_seconds(self.seconds)}"


def least_seconds(graph: OpGraph, cluster: Cluster) -> float:
    """Seconds of a step whose every operator is shared out evenly, with no traffic."""
    total = 0.0
    for op in graph.operators():
        if op.kind in STRUCTURED:
            continue
        read = op.operand_types[op.kind in SLICING :]
        num_bytes = sum(kind.bytes for kind in (*read, *op.result_types))
        dtypes = [kind.dtype for kind in op.operand_types if not kind.is_extended]
        seconds = operator_seconds(
            op.kind,
            total_flops(op) / cluster.num_devices,
            num_bytes / cluster.num_devices,
            dtypes[0] if dtypes else "float32",
            cluster,
        )
        total += seconds * graph.blocks[op.block].weight
    return total


@dataclass
class MeshSearch:
    """The shapes that are planned on, as the plans on those before ask."""

    cluster: Cluster
    shapes: Sequence[MeshShape]
    limits: SearchLimits = NO_LIMITS
    trials: dict[MeshShape, Trial] = field(default_factory=dict)

    def best(self) -> Asking[IntraOpSolution]:
        """The plan on the best shape.

        Raises:
          InfeasiblePlanError: no shape that was tried has a plan; it is the one of the
            least budget.
        """
        best = yield from self._first_that_fits()
        while (better := (yield from self._better_neighbour(best))) is not None:
            best = better
        if self._may_tighten(best):
            best = yield from self._try(best.mesh, TIGHT_GAP)
        assert best.solution is not None, "what is best has a plan"
        return best.solution

    def others(self, best: IntraOpSolution) -> tuple[TriedPlan, ...]:
        """The best plans on other shapes, of those that were solved to their end."""
        return tuple(
            TriedPlan(f'mesh="{each.mesh}"', each.solution.plan.predicted)
            for each in self.trials.values()
            if each.solution is not None
            and each.solution is not best
            and not each.is_ended
        )

    def __str__(self) -> str:
        tried = ", ".join(map(str, self.trials.values()))
        return f"{len(self.shapes)} aligned shapes; tried {tried}"

    def _may_tighten(self, best: Trial) -> bool:
        if best.is_searched or best.is_ended or best.solution is None:
            return False
        takes_long = self.limits.is_long and best.mesh.num_axes == MAX_AXES
        # Wider than loose is all that could be had.
        return not takes_long and TIGHT_GAP < best.solution.assignment.gap <= LOOSE_GAP

    def _first_that_fits(self) -> Asking[Trial]:
        """One axis; where nothing fits, one for each level, then one of the finest.

        Or others that come first, as they divide more. To find that nothing fits takes
        long, so the last is left out unless cutting brought the least budget that would
        do clearly down.
        """
        finest = [each for each in self.shapes[2:] if each.num_axes == MAX_AXES]
        errors: list[InfeasiblePlanError] = []
        for mesh in (*self.shapes[:2], *finest[:1]):
            needs = [_least_budget(each) for each in errors]
            if len(needs) == 2 and min(needs) > HELPS * max(needs):
                break
            trial = yield from self._try(mesh, LOOSE_GAP if errors else TIGHT_GAP)
            if trial.error is None:
                return trial
            errors.append(trial.error)
        raise min(errors, key=_least_budget)

    def _better_neighbour(self, best: Trial) -> Asking[Trial | None]:
        is_far = best.seconds > FAR * self.limits.floor_seconds
        for mesh in neighbours(best.mesh, self.cluster, every_cut=is_far):
            if mesh in self.trials or not self._may_pay(mesh, best):
                continue
            if sum(each.is_searched for each in self.trials.values()) >= MOST_SEARCHED:
                return None
            trial = yield from self._try(mesh, LOOSE_GAP, self._cutoff(best))
            is_first = best.is_ended and not trial.is_ended and trial.error is None
            if is_first or trial.seconds < best.cutoff:
                return trial
        return None

    def _cutoff(self, best: Trial) -> float:
        """What another shape must stay below, if the best so far is of any use."""
        return self.limits.cutoff if best.is_ended else best.cutoff

    def _may_pay(self, mesh: MeshShape, best: Trial) -> bool:
        """Whether no bound that is known rules a shape out, nor its many equal axes."""
        if mesh.num_axes == MAX_AXES and self.cluster.num_hosts == 1:
            if min(mesh.axis_sizes) < SMALLEST:
                return False
        bounds = [self.limits.floor_seconds]
        for trial in self.trials.values():
            if trial.error is None and is_refined_by(mesh, trial.mesh):
                bounds.append(trial.bound_seconds)
        return max(bounds) < self._cutoff(best)

    def _try(
        self, mesh: MeshShape, gap: float, cutoff: float = math.inf
    ) -> Asking[Trial]:
        """A plan on a shape, if it may take less than the cutoff."""
        if self.limits.is_long:
            _log.info("planning on %s", mesh)
        cutoff = min(cutoff, self.limits.cutoff)
        try:
            found = yield mesh, gap, cutoff
        except InfeasiblePlanError as error:
            self.trials[mesh] = Trial(mesh, error=error.without_frames())
            return self.trials[mesh]
        seconds, solved = found.plan.predicted.step_seconds, found.assignment
        is_ended = solved.bound >= cutoff and solved.gap > gap
        bound = solved.bound if is_ended else min(solved.bound, seconds)
        seconds = bound if is_ended else seconds
        self.trials[mesh] = Trial(mesh, seconds, bound, found, is_ended=is_ended)
        return self.trials[mesh]


def _least_budget(error: InfeasiblePlanError) -> float:
    return error.least_budget_bytes or math.inf
