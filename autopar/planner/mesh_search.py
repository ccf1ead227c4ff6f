"""Which logical mesh to plan on, where the user names none: shapes are searched.

Devices are numbered host by host, and a mesh is that row of devices, cut: `x:16;y:4`
cuts 64 devices into runs of 4. A shape is *aligned* if every cut keeps to the levels of
the cluster, whole hosts or equal parts of each host. Axes inside one level have equal
links, so of their orders only the descending one is a candidate.

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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds
from ..errors import InfeasiblePlanError
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import OpGraph
from ..plans.explain import format_seconds
from ..sharding.mesh import MeshShape
from .intra_op import IntraOpSolution
from .plan_within import BUDGET_GAP
from .search_work import SearchWork
from .strategies import SLICING, total_flops

WORTH = 0.005
"""The part of a step's time that a shape must save to be taken over a simpler one."""

FAR = 1.25
"""How many times the floor a step takes where much may still be gained."""

HELPS = 0.9
"""What the least budget must fall to where a finer shape is worth a try."""

SMALLEST = 4
"""The least size of each of three axes with equal links: these take long to solve."""

LOOSE_GAP = 0.005
TIGHT_GAP = 1e-4
MAX_AXES = 3
_NAMES = ("x", "y", "z")

PlanOn = Callable[[MeshShape, float, float], IntraOpSolution]


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
    def cutoff(self) -> float:
        """Seconds that another shape must stay below; gaps are wider within budgets."""
        return self.seconds * (1 - (BUDGET_GAP if self.is_searched else WORTH))

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


def default_mesh(cluster: Cluster) -> MeshShape:
    """The shape where none is searched: one axis, or one for each level."""
    if cluster.num_hosts == 1 or cluster.devices_per_host == 1:
        return _shape((cluster.num_devices,))
    return _shape((cluster.num_hosts, cluster.devices_per_host))


def mesh_shapes(cluster: Cluster, max_axes: int = MAX_AXES) -> tuple[MeshShape, ...]:
    """Every aligned shape of the whole cluster, fewest axes first, symmetric ones once.

    Axes have two devices or more and are called x, y, z, major first.
    """
    number, inside = cluster.num_devices, cluster.devices_per_host
    cuts = [cut for cut in _divisors(number) if inside % cut == 0 or cut % inside == 0]
    inner = [cut for cut in cuts if 1 < cut < number]
    found = [
        sizes
        for chain in _chains(inner, max_axes - 1)
        if _is_canonical(sizes := _sizes(number, chain), inside)
    ]
    return tuple(_shape(sizes) for sizes in sorted(found, key=_order(cluster)))


def search_meshes(
    cluster: Cluster,
    plan_on: PlanOn,
    floor_seconds: float = 0.0,
    on_mesh: Callable[[MeshShape], None] = lambda mesh: None,
    work: SearchWork | None = None,
    binds_on: Callable[[MeshShape], bool] = lambda mesh: False,
    shapes: tuple[MeshShape, ...] = (),
) -> MeshSearch:
    """The cheapest predicted plan over the aligned shapes; see the top of the file.

    Args:
      cluster: gives the shapes.
      plan_on: plans on one shape, up to a relative gap, or until its bound is at least
        a cutoff in seconds.
      floor_seconds: no shape's plan takes less; see `least_seconds`.
      on_mesh: is told which shape is planned on next.
      work: what plans within a budget may take; where little of it is left, and a
        plan was found, no other shape is begun.
      binds_on: whether to find a plan on a shape takes long, as the cheapest does not
        fit; see `_first_shapes`.
      shapes: all of them, those first that are begun with; else as in `mesh_shapes`.

    Raises:
      InfeasiblePlanError: no shape that was tried has a plan; it is the one of the
        least budget.
    """
    shapes = shapes or mesh_shapes(cluster)
    place = cluster, shapes, plan_on, floor_seconds
    return _Search(*place, on_mesh, work, binds_on).run()


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


class _Search:
    def __init__(
        self,
        cluster: Cluster,
        shapes: tuple[MeshShape, ...],
        plan_on: PlanOn,
        floor_seconds: float,
        on_mesh: Callable[[MeshShape], None],
        work: SearchWork | None,
        binds_on: Callable[[MeshShape], bool],
    ) -> None:
        self.cluster, self.plan_on, self.on_mesh = cluster, plan_on, on_mesh
        self.floor_seconds, self.work = floor_seconds, work or SearchWork()
        self.shapes, self.binds_on = shapes, binds_on
        self.trials: dict[MeshShape, Trial] = {}

    def run(self) -> MeshSearch:
        best = self._first_that_fits()
        while (better := self._better_neighbour(best)) is not None:
            best = better
        is_loose = TIGHT_GAP < best.gap <= LOOSE_GAP  # wider is all that could be had
        if is_loose and not best.is_searched:
            best = self._try(best.mesh, TIGHT_GAP)
        assert best.solution is not None
        trials = tuple(self.trials.values())
        return MeshSearch(best.solution, trials, len(self.shapes), self.floor_seconds)

    def _first_that_fits(self) -> Trial:
        """One axis; where nothing fits, one for each level, then one of the finest.

        Or others that come first, as they divide more. To find that nothing fits takes
        long, so the last is left out unless cutting brought the least budget that would
        do clearly down, and where the budget is far below it.
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
        raise _least_infeasible(list(self.trials.values()))

    def _first_shapes(self) -> tuple[MeshShape, ...]:
        """One axis, then one for each level.

        The other way round where memory binds on a cluster of levels, so that work is
        not spent on the one axis: the cut shape can do all that it can.
        """
        first = self.shapes[:2]
        has_levels = default_mesh(self.cluster).num_axes == 2
        if has_levels and len(first) == 2 and self.binds_on(first[0]):
            return first[::-1]
        return first

    def _better_neighbour(self, best: Trial) -> Trial | None:
        is_far = best.seconds > FAR * self.floor_seconds
        for mesh in neighbours(best.mesh, self.cluster, every_cut=is_far):
            if mesh in self.trials or not self._may_pay(mesh, best):
                continue
            if self.work.is_little:
                return None
            trial = self._try(mesh, LOOSE_GAP, best.cutoff)
            if trial.seconds < best.cutoff:
                return trial
        return None

    def _may_pay(self, mesh: MeshShape, best: Trial) -> bool:
        """Whether no bound that is known rules a shape out, nor its many equal axes."""
        if mesh.num_axes == MAX_AXES and self.cluster.num_hosts == 1:
            if min(mesh.axis_sizes) < SMALLEST:
                return False
        bounds = [self.floor_seconds]
        for trial in self.trials.values():
            if trial.error is None and is_refined_by(mesh, trial.mesh):
                bounds.append(trial.bound_seconds)
        return max(bounds) < best.cutoff

    def _try(self, mesh: MeshShape, gap: float, cutoff: float = math.inf) -> Trial:
        self.on_mesh(mesh)
        spent = self.work.clock.spent
        try:
            solution = self.plan_on(mesh, gap, cutoff)
        except InfeasiblePlanError as error:
            trial = Trial(mesh, math.inf, math.inf, 0.0, error=error.without_frames())
        else:
            seconds = solution.plan.predicted.step_seconds
            found = solution.assignment
            is_over = found.bound >= cutoff and found.gap > gap
            # A plan may take less than the solver's cost, as copies are made of copies.
            if is_over and found.bound - max(found.cost - seconds, 0.0) < cutoff:
                return self._try(mesh, gap)
            bound = min(found.bound, seconds)
            is_searched = self.work.clock.spent > spent
            trial = Trial(
                *(mesh, seconds, bound, found.gap, solution),
                is_ruled_out=is_over,
                is_searched=is_searched,
            )
        self.trials[mesh] = trial
        return trial


def neighbours(
    mesh: MeshShape, cluster: Cluster, *, every_cut: bool = True
) -> Iterator[MeshShape]:
    """Shapes one step away: a cut moved to the next place, then an axis cut in two.

    An axis is cut between the levels if it holds both, else near its middle; with
    `every_cut` at its other places too.
    """
    shapes = {shape.axis_sizes: shape for shape in mesh_shapes(cluster)}
    sizes = mesh.axis_sizes
    near = [*_moved(sizes, shapes)]
    for places in _cut_in_two(sizes, shapes, cluster):
        near += places if every_cut else places[:1]
    yield from (shapes[each] for each in dict.fromkeys(near))


def is_refined_by(mesh: MeshShape, other: MeshShape) -> bool:
    """Whether `other` is `mesh` with none or more of its axes cut further."""
    return _cuts(mesh.axis_sizes) <= _cuts(other.axis_sizes)


_Sizes = tuple[int, ...]


def _moved(sizes: _Sizes, shapes: dict[_Sizes, MeshShape]) -> Iterator[_Sizes]:
    """For each pair of adjacent axes the nearest shapes with their cut elsewhere."""
    for axis in range(len(sizes) - 1):
        before, after = sizes[:axis], sizes[axis + 2 :]
        pair = math.prod(sizes[axis : axis + 2])
        minor = sorted(
            each[axis + 1]
            for each in shapes
            if len(each) == len(sizes)
            and each[:axis] == before
            and each[axis + 2 :] == after
        )
        place = minor.index(sizes[axis + 1])
        for near in minor[max(place - 1, 0) : place + 2]:
            if near != sizes[axis + 1]:
                yield (*before, pair // near, near, *after)


def _cut_in_two(
    sizes: _Sizes, shapes: dict[_Sizes, MeshShape], cluster: Cluster
) -> Iterator[list[_Sizes]]:
    """For each axis the shapes in which it is cut once more, the best place first."""
    for axis, size in enumerate(sizes):
        before, after = sizes[:axis], sizes[axis + 1 :]
        level = cluster.devices_per_host // math.prod(after)

        def merit(minor: int, size: int = size, level: int = level) -> tuple[bool, int]:
            return minor != level, size // minor + minor

        places = [
            (*before, size // minor, minor, *after)
            for minor in sorted(_divisors(size), key=merit)
        ]
        canonical = [_canonical(each, cluster.devices_per_host) for each in places]
        yield [each for each in dict.fromkeys(canonical) if each in shapes]


def _least_infeasible(trials: Sequence[Trial]) -> InfeasiblePlanError:
    errors = [trial.error for trial in trials if trial.error is not None]
    return min(errors, key=lambda error: error.least_budget_bytes or math.inf)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _chains(cuts: Sequence[int], length: int) -> Iterator[_Sizes]:
    """Up to `length` of the cuts, descending, each a multiple of the next."""
    yield ()
    if length:
        for cut in cuts:
            below = [each for each in cuts if each < cut and cut % each == 0]
            yield from ((cut, *rest) for rest in _chains(below, length - 1))


def _sizes(number: int, chain: Sequence[int]) -> _Sizes:
    """The axes of `number` devices cut into runs of the lengths in `chain`."""
    runs = (number, *chain, 1)
    return tuple(run // inner for run, inner in pairwise(runs))


def _cuts(sizes: _Sizes) -> set[int]:
    return {math.prod(sizes[axis:]) for axis in range(1, len(sizes))}


def _is_canonical(sizes: _Sizes, inside: int) -> bool:
    """Whether axes inside one level descend; those that span both are left alone."""
    return sizes == _canonical(sizes, inside)


def _canonical(sizes: _Sizes, inside: int) -> _Sizes:
    """The same with the axes of each level in descending order."""
    for axis in range(len(sizes) - 1):
        one, other = sizes[axis : axis + 2]
        minor = math.prod(sizes[axis + 2 :])
        is_one_level = minor * one * other <= inside or minor >= inside
        if is_one_level and one < other:
            swapped = (*sizes[:axis], other, one, *sizes[axis + 2 :])
            return _canonical(swapped, inside)
    return sizes


def _order(cluster: Cluster) -> Callable[[_Sizes], tuple[int, bool, int, _Sizes]]:
    """Fewest axes first, then those cut between the levels, then balanced ones."""

    def key(sizes: _Sizes) -> tuple[int, bool, int, _Sizes]:
        is_apart = cluster.devices_per_host not in _cuts(sizes)
        return len(sizes), is_apart, sum(sizes), sizes

    return key


def _shape(sizes: _Sizes) -> MeshShape:
    return MeshShape(_NAMES[: len(sizes)], sizes)


def _seconds_text(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "does not fit"
