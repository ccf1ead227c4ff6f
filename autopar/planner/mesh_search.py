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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds
from ..errors import InfeasiblePlanError
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import OpGraph
from ..plans.explain import format_seconds
from ..sharding.mesh import MeshShape
from .budget_search import BUDGET_GAP
from .even_share import is_long
from .intra_op import IntraOpSolution
from .mesh_shapes import (
    MAX_AXES,
    default_mesh,
    is_refined_by,
    mesh_shapes,
    neighbours,
)
from .search_work import SearchWork
from .strategies import SLICING, total_flops

WORTH = 0.005
"""The part of a step's time that a shape must save to be taken over a simpler one."""

FAR = 1.25
"""How many times the floor a step takes where much may still be gained."""

HELPS = 0.9
"""What the least budget must fall to where a finer shape is worth a try."""

NEAR_LEAST = 1.1
"""Times what any plan holds, a least budget that no other shape brings down by much."""

SMALLEST = 4
"""The least size of each of three axes with equal links: these take long to solve."""

LOOSE_GAP = 0.005
TIGHT_GAP = 1e-4
_log = logging.getLogger("autopar")

PlanOn = Callable[[MeshShape, float, float], IntraOpSolution]
FreeOn = Callable[[MeshShape, float], IntraOpSolution]


@dataclass(frozen=True)
class ShapePlanner:
    """How a step is planned on one shape.

    Attributes:
      plan_on: plans up to a relative gap, or until its bound is at least a cutoff in
        seconds.
      free_on: plans up to a relative gap, without a budget; None where `plan_on` does.
      binds_on: whether to find a plan takes long, as the cheapest does not fit.
      tell: is told which shape is planned on next.
    """

    plan_on: PlanOn
    free_on: FreeOn | None = None
    binds_on: Callable[[MeshShape], bool] = lambda mesh: False
    tell: Callable[[MeshShape], None] = lambda mesh: None

    def plan_below(
        self, mesh: MeshShape, gap: float, cutoff: float
    ) -> tuple[IntraOpSolution, bool]:
        """A plan on a shape, and whether no plan there takes less than the cutoff.

        A plan may take less than the solver's cost, as copies are made of copies. What
        was ended early may do so by much, so then the cheapest plan of all is asked
        what that is, before any is searched for within a budget.
        """
        solution = self.plan_on(mesh, gap, cutoff)
        found = solution.assignment
        if found.bound < cutoff or found.gap <= gap:
            return solution, False
        if _least_of(solution) >= cutoff:
            return solution, True
        if self.free_on is not None:
            free = self.free_on(mesh, gap)
            if _least_of(free) >= cutoff:
                return free, True
        return self.plan_on(mesh, gap, math.inf), False


@dataclass(frozen=True)
class SearchLimits:
    """What a search of meshes need not look at.

    Attributes:
      floor_seconds: no shape's plan takes less; see `least_seconds`.
      cutoff: plans of so many seconds are of no use: where no shape has a better one,
        the plan is any and need not fit.
      is_long: three axes take long to solve, so their plan keeps the loose gap.
      least_bytes: says what a device should hold on any shape; see `even_share.py`.
    """

    floor_seconds: float = 0.0
    cutoff: float = math.inf
    is_long: bool = False
    least_bytes: Callable[[], float] = lambda: 0.0


NO_LIMITS = SearchLimits()


@dataclass(frozen=True)
class Trial:
    """A shape, what a step takes on it, and the bound; infinite where nothing fits.

    `is_ruled_out`: the solution was ended, its bound being above what is worth taking.
    `is_searched`: memory binds, so the plan was searched for within the budget.
    """

    mesh: MeshShape
    seconds: float
    bound_seconds: float
    gap: float
    solution: IntraOpSolution | None = None
    error: InfeasiblePlanError | None = None
    is_ruled_out: bool = False
    is_searched: bool = False

    @property
    def least_seconds(self) -> float:
        """What a step takes, or at least if the shape is ruled out."""
        return self.bound_seconds if self.is_ruled_out else self.seconds

    @property
    def cutoff(self) -> float:
        """Seconds that another shape must stay below; gaps are wider within budgets."""
        return self.least_seconds * (1 - (BUDGET_GAP if self.is_searched else WORTH))

    def __str__(self) -> str:
        if self.is_ruled_out:
            return f"{self.mesh} over {format_seconds(self.bound_seconds)}"
        return f"{self.mesh} {_seconds_text(self.seconds)}"


@dataclass(frozen=True)
class MeshSearch:
    """The cheapest shape's plan, and every shape that was solved, in order."""

    solution: IntraOpSolution
    trials: tuple[Trial, ...]
    num_shapes: int
    floor_seconds: float

    def __str__(self) -> str:
        mesh = self.solution.plan.mesh
        tried = ", ".join(map(str, self.trials))
        return f"mesh {mesh} of {self.num_shapes} aligned shapes; tried {tried}"


def tell_shapes(graph: OpGraph) -> Callable[[MeshShape], None]:
    """Says on which shape a step is planned next, if that takes long."""

    def tell(mesh: MeshShape) -> None:
        if is_long(graph):
            _log.info("%s: planning on %s", graph.name, mesh)

    return tell


def search_meshes(
    cluster: Cluster,
    planner: ShapePlanner,
    shapes: Sequence[MeshShape] = (),
    limits: SearchLimits = NO_LIMITS,
    work: SearchWork | None = None,
) -> MeshSearch:
    """The cheapest predicted plan over the aligned shapes; see the top of the file.

    Args:
      cluster: gives the shapes.
      planner: plans on one of them.
      shapes: all of them, those first that are begun with; else as in `mesh_shapes`.
      limits: what need not be looked at.
      work: what plans within a budget may take; where little of it is left, and a
        plan was found, no other shape is begun.

    Raises:
      InfeasiblePlanError: no shape that was tried has a plan; it is the one of the
        least budget.
    """
    shapes = tuple(shapes) or mesh_shapes(cluster)
    return _Search(cluster, planner, shapes, limits, work or SearchWork()).run()


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


@dataclass(frozen=True)
class _Search:
    cluster: Cluster
    planner: ShapePlanner
    shapes: tuple[MeshShape, ...]
    limits: SearchLimits
    work: SearchWork
    trials: dict[MeshShape, Trial] = field(default_factory=dict)

    def run(self) -> MeshSearch:
        best = self._first_that_fits()
        while (better := self._better_neighbour(best)) is not None:
            best = better
        if self._may_tighten(best):
            best = self._try(best.mesh, TIGHT_GAP)
        assert best.solution is not None
        trials = tuple(self.trials.values())
        floor_seconds = self.limits.floor_seconds
        return MeshSearch(best.solution, trials, len(self.shapes), floor_seconds)

    def _may_tighten(self, best: Trial) -> bool:
        is_loose = TIGHT_GAP < best.gap <= LOOSE_GAP  # wider is all that could be had
        takes_long = self.limits.is_long and best.mesh.num_axes == MAX_AXES
        is_done = best.is_searched or best.is_ruled_out
        return is_loose and not is_done and not takes_long

    def _first_that_fits(self) -> Trial:
        """One axis; where nothing fits, one for each level, then one of the finest.

        Or others that come first, as they divide more. To find that nothing fits takes
        long, so the last is left out unless cutting brought the least budget that would
        do clearly down, and where the budget is far below it; and so is any other where
        that budget is near what every plan holds.
        """
        finest = [each for each in self.shapes[2:] if each.num_axes == MAX_AXES]
        needs: list[float] = []
        is_far = False
        for mesh in (*self._first_shapes(), *finest[:1]):
            if len(needs) == 2 and (is_far or min(needs) > HELPS * max(needs)):
                break
            trial = self._try(mesh, LOOSE_GAP if needs else TIGHT_GAP)
            if trial.error is None:
                return trial
            needs.append(trial.error.least_budget_bytes or math.inf)
            is_far |= trial.error.far_bound_bytes > 0
            if needs[-1] <= NEAR_LEAST * self.limits.least_bytes():
                break
        raise _least_infeasible(list(self.trials.values()))

    def _first_shapes(self) -> tuple[MeshShape, ...]:
        """One axis, then one for each level.

        The other way round where memory binds on a cluster of levels, so that work is
        not spent on the one axis: the cut shape can do all that it can.
        """
        first = self.shapes[:2]
        has_levels = default_mesh(self.cluster).num_axes == 2
        is_cut = len(first) == 2 and first[0].num_axes == 1
        if has_levels and is_cut and self.planner.binds_on(first[0]):
            return first[::-1]
        return first

    def _better_neighbour(self, best: Trial) -> Trial | None:
        is_far = best.least_seconds > FAR * self.limits.floor_seconds
        for mesh in neighbours(best.mesh, self.cluster, every_cut=is_far):
            if mesh in self.trials or not self._may_pay(mesh, best):
                continue
            if self.work.is_little(best.mesh.num_axes):
                return None
            trial = self._try(mesh, LOOSE_GAP, self._cutoff(best))
            if self._is_better(trial, best):
                return trial
        return None

    def _is_better(self, trial: Trial, best: Trial) -> bool:
        if best.is_ruled_out and not trial.is_ruled_out:
            return trial.error is None
        return trial.least_seconds < best.cutoff

    def _cutoff(self, best: Trial) -> float:
        """What another shape must stay below, if the best so far is of any use."""
        return self.limits.cutoff if best.is_ruled_out else best.cutoff

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

    def _try(self, mesh: MeshShape, gap: float, cutoff: float = math.inf) -> Trial:
        self.planner.tell(mesh)
        spent = self.work.clock.spent
        try:
            least = min(cutoff, self.limits.cutoff)
            solution, is_over = self.planner.plan_below(mesh, gap, least)
        except InfeasiblePlanError as error:
            trial = Trial(mesh, math.inf, math.inf, 0.0, error=error.without_frames())
        else:
            seconds = solution.plan.predicted.step_seconds
            found = solution.assignment
            bound = min(found.bound, seconds)
            is_searched = self.work.clock.spent > spent
            trial = Trial(
                *(mesh, seconds, bound, found.gap, solution),
                is_ruled_out=is_over,
                is_searched=is_searched,
            )
        self.trials[mesh] = trial
        return trial


def _least_of(solution: IntraOpSolution) -> float:
    """The bound, less what the plan takes below the solver's cost."""
    found, seconds = solution.assignment, solution.plan.predicted.step_seconds
    return found.bound - max(found.cost - seconds, 0.0)


def _least_infeasible(trials: Sequence[Trial]) -> InfeasiblePlanError:
    errors = [trial.error for trial in trials if trial.error is not None]
    return min(errors, key=lambda error: error.least_budget_bytes or math.inf)


def _seconds_text(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "does not fit"
