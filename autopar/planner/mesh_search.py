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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

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

Attempts = Generator["Attempt", None, "Trial"]


@dataclass(frozen=True)
class Attempt:
    """A shape to plan on within a gap, or until the bound is the cutoff in seconds."""

    mesh: MeshShape
    gap: float
    cutoff: float = math.inf


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

    `is_ended`: the solution was ended, its bound being above the cutoff.
    `is_ruled_out`: and its plan takes no less.
    `is_searched`: memory binds, so the plan was searched for within the budget.
    """

    mesh: MeshShape
    seconds: float
    bound_seconds: float
    gap: float
    solution: IntraOpSolution | None = None
    error: InfeasiblePlanError | None = None
    is_ended: bool = False
    is_ruled_out: bool = False
    is_searched: bool = False

    @property
    def least_seconds(self) -> float:
        """What a step takes, or at least if the shape is ruled out."""
        return self.bound_seconds if self.is_ruled_out else self.seconds

    @property
    def cutoff(self) -> float:
        """Seconds that another shape must stay below."""
        return self.least_seconds * (1 - WORTH)

    def __str__(self) -> str:
        if self.is_ruled_out:
            return f"{self.mesh} over {format_seconds(self.bound_seconds)}"
        return f"{self.mesh} {_seconds_text(self.seconds)}"


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
    """The shapes to plan on, one after the other, as the plans on those before ask.

    Each attempt that it gives is answered by `add` before the next; see the top of the
    file. `named` is the one shape to plan on, within `gap`, where there is no choice.

    Raises (where it goes on):
      InfeasiblePlanError: no shape that was tried has a plan; it is the one of the
        least budget.
    """

    cluster: Cluster
    shapes: Sequence[MeshShape] = ()
    limits: SearchLimits = NO_LIMITS
    named: MeshShape | None = None
    gap: float = TIGHT_GAP
    trials: dict[MeshShape, Trial] = field(default_factory=dict)
    best: Trial | None = None

    def __iter__(self) -> Iterator[Attempt]:
        if self.named is not None:
            self.best = yield from self._try(self.named, self.gap)
            if self.best.error is not None:
                raise self.best.error
            return
        best = self.best = yield from self._first_that_fits()
        while (better := (yield from self._better_neighbour(best))) is not None:
            best = self.best = better
        if self._may_tighten(best):
            self.best = yield from self._try(best.mesh, TIGHT_GAP)

    @property
    def solution(self) -> IntraOpSolution:
        """The plan on the best shape."""
        assert self.best is not None and self.best.solution is not None
        return self.best.solution

    def __str__(self) -> str:
        mesh = self.solution.plan.mesh
        tried = ", ".join(map(str, self.trials.values()))
        return f"mesh {mesh} of {len(self.shapes)} aligned shapes; tried {tried}"

    def others(self) -> tuple[TriedPlan, ...]:
        """The best plans on other shapes, of those that were solved to their end."""
        return tuple(
            TriedPlan(f'mesh="{each.mesh}"', each.solution.plan.predicted)
            for each in self.trials.values()
            if each.solution is not None
            and each.solution is not self.solution
            and not each.is_ruled_out
        )

    def add(
        self, attempt: Attempt, found: IntraOpSolution | InfeasiblePlanError
    ) -> None:
        """Notes what planning on a shape led to."""
        self.trials[attempt.mesh] = _trial(attempt, found)

    def _may_tighten(self, best: Trial) -> bool:
        is_loose = TIGHT_GAP < best.gap <= LOOSE_GAP  # wider is all that could be had
        takes_long = self.limits.is_long and best.mesh.num_axes == MAX_AXES
        is_done = best.is_searched or best.is_ruled_out
        return is_loose and not is_done and not takes_long

    def _first_that_fits(self) -> Attempts:
        """One axis; where nothing fits, one for each level, then one of the finest.

        Or others that come first, as they divide more. To find that nothing fits takes
        long, so the last is left out unless cutting brought the least budget that would
        do clearly down.
        """
        finest = [each for each in self.shapes[2:] if each.num_axes == MAX_AXES]
        needs: list[float] = []
        for mesh in (*self.shapes[:2], *finest[:1]):
            if len(needs) == 2 and min(needs) > HELPS * max(needs):
                break
            trial = yield from self._try(mesh, LOOSE_GAP if needs else TIGHT_GAP)
            if trial.error is None:
                return trial
            needs.append(trial.error.least_budget_bytes or math.inf)
        raise _least_infeasible(list(self.trials.values()))

    def _better_neighbour(self, best: Trial) -> Generator[Attempt, None, Trial | None]:
        is_far = best.least_seconds > FAR * self.limits.floor_seconds
        for mesh in neighbours(best.mesh, self.cluster, every_cut=is_far):
            if mesh in self.trials or not self._may_pay(mesh, best):
                continue
            if sum(each.is_searched for each in self.trials.values()) >= MOST_SEARCHED:
                return None
            trial = yield from self._try(mesh, LOOSE_GAP, self._cutoff(best))
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

    def _try(self, mesh: MeshShape, gap: float, cutoff: float = math.inf) -> Attempts:
        """A plan on a shape; solved to the end if it may take less than the cutoff.

        A plan may take less than the solver's cost, as copies are made of copies. What
        was ended early may do so by much.
        """
        if self.limits.is_long:
            _log.info("planning on %s", mesh)
        least = min(cutoff, self.limits.cutoff)
        yield Attempt(mesh, gap, least)
        if self.trials[mesh].is_ended and not self.trials[mesh].is_ruled_out:
            yield Attempt(mesh, gap)
        return self.trials[mesh]


def _trial(attempt: Attempt, found: IntraOpSolution | InfeasiblePlanError) -> Trial:
    if isinstance(found, InfeasiblePlanError):
        error = found.without_frames()
        worst = attempt.mesh, math.inf, math.inf, 0.0
        return Trial(*worst, error=error, is_searched=True)
    seconds, solved = found.plan.predicted.step_seconds, found.assignment
    is_ended = solved.bound >= attempt.cutoff and solved.gap > attempt.gap
    return Trial(
        *(attempt.mesh, seconds, min(solved.bound, seconds), solved.gap, found),
        is_ended=is_ended,
        is_ruled_out=is_ended and _least_of(found) >= attempt.cutoff,
        is_searched=found.is_searched,
    )


def _least_of(solution: IntraOpSolution) -> float:
    """The bound, less what the plan takes below the solver's cost."""
    found, seconds = solution.assignment, solution.plan.predicted.step_seconds
    return found.bound - max(found.cost - seconds, 0.0)


def _least_infeasible(trials: Sequence[Trial]) -> InfeasiblePlanError:
    errors = [trial.error for trial in trials if trial.error is not None]
    return min(errors, key=lambda error: error.least_budget_bytes or math.inf)


def _seconds_text(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "does not fit"
