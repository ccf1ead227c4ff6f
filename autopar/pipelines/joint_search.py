"""Stages, submeshes, logical shapes, microbatches and schedule, searched as one.

A case is a number of microbatches and a schedule. Each has a bound on a step's time,
with the costs known so far; that of the least bound is solved. Where its stages stand
on costs that are guessed, the layers are planned there (`span_costs.py`) and the case
is put back; otherwise it is the best so far. The search ends once no case left may be
faster by more than the gap: guesses are no higher than what planning finds, but for the
estimates that `span_costs.py` names.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import process_time
from typing import TypeVar

import numpy as np

from autopar.solver.stage_dp import StageAssignment, least_step_seconds, solve_stages
from autopar.solver.stage_problem import (
    ScheduleName,
    StageProblem,
)

from ..clusters.cluster import Cluster
from ..clusters.joined import host_parts
from ..graph.garbage import without_garbage_collection
from ..options import Options
from ..planner.mesh_shapes import mesh_shapes
from ..sharding.mesh import MeshShape, parse_mesh
from .layer_samples import Submesh
from .span_costs import SpanCosts

LOOSE_GAP = 0.01

_Result = TypeVar("_Result")
Case = tuple[int, ScheduleName, int]  # microbatches, schedule, stages of a submesh


@dataclass(frozen=True, eq=False)
class FoundStages:
    """The best stages, and what no others take less than in the model of costs."""

    problem: StageProblem
    assignment: StageAssignment
    bound_seconds: float

    def labels(self) -> list[Submesh]:
        """The submesh of each stage."""
        choices = self.problem.choices
        found = [choices[each.choice].label for each in self.assignment.stages]
        return [label for label in found if isinstance(label, Submesh)]


@dataclass
class JointSearch:
    """The search over all cases; costs that were planned are kept between calls.

    `seconds` are CPU seconds of the dynamic programs and on layers, `count` how many.
    `min_stages` is how many there must be, `max_stages` how many there may be.
    """

    costs: SpanCosts
    cluster: Cluster
    submeshes: Sequence[Submesh]
    counts: Sequence[int]
    schedules: Sequence[tuple[ScheduleName, int]]
    seconds: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    min_stages: int = 2
    max_stages: int | None = None

    @without_garbage_collection()
    def best(self, capacity_bytes: float) -> FoundStages | None:
        """The fastest stages that hold up to `capacity_bytes` a device, or None.

        1F1B is eager 1F1B in less memory and more time, so it comes last.
        """
        is_last = [each == ("1f1b", 1) for each in self.schedules]
        best: FoundStages | None = None
        for last in (False, True):
            pairs = zip(self.schedules, is_last, strict=True)
            schedules = [each for each, own in pairs if own == last]
            best = self._best_of(schedules, capacity_bytes, best)
        if best is None:
            return None
        bound = best.assignment.seconds * (1 - LOOSE_GAP)
        return replace(best, bound_seconds=bound)

    def _best_of(
        self,
        schedules: Sequence[tuple[ScheduleName, int]],
        capacity_bytes: float,
        best: FoundStages | None,
    ) -> FoundStages | None:
        """The fastest stages of some schedules, or those that are known already."""
        waiting: list[tuple[float, Case]] = []
        for number in self.counts:
            for schedule, shared in schedules:
                case = number, schedule, shared
                waiting.append((self._least(case, capacity_bytes), case))
        heapq.heapify(waiting)
        limit = inf if best is None else best.assignment.seconds
        while waiting and waiting[0][0] < limit * (1 - LOOSE_GAP):
            bound, case = heapq.heappop(waiting)
            least = max(bound, self._least(case, capacity_bytes))
            if waiting and least > max(bound, waiting[0][0]):
                heapq.heappush(waiting, (least, case))
                continue
            found = self._found(case, capacity_bytes, limit)
            if found is None:
                continue
            is_next = not waiting or found.bound_seconds <= max(bound, waiting[0][0])
            if not is_next or self._look_at_guessed(found):
                heapq.heappush(waiting, (found.bound_seconds, case))
            elif found.assignment.seconds < limit:
                best, limit = found, found.assignment.seconds
        return best

    def _least(self, case: Case, capacity_bytes: float) -> float:
        problem = self.problem(case, capacity_bytes)
        return self._timed("solve", lambda: least_step_seconds(problem))

    def _found(
        self, case: Case, capacity_bytes: float, limit: float
    ) -> FoundStages | None:
        """The best stages of a case; none that is not faster than the limit."""
        problem = self.problem(case, capacity_bytes)
        found = self._timed("solve", lambda: solve_stages(problem, LOOSE_GAP, limit))
        return None if found is None else FoundStages(problem, found, found.bound)

    def problem(self, case: Case, capacity_bytes: float) -> StageProblem:
        """The problem of a case, with the costs as they are known."""
        number, schedule, shared = case
        cluster, layers = self.cluster, self.costs.layers
        links = cluster.host_link, cluster.network_link
        crossing = (np.array(layers.crossing_bytes) * 2)[None, :]
        per_byte = np.array([[each.seconds_per_byte] for each in links])
        return StageProblem(
            len(layers),
            host_parts(cluster),
            cluster.devices_per_host,
            tuple(self.costs.choice(each, number) for each in self.submeshes),
            per_byte * crossing / number,
            (2 * links[0].alpha_seconds, 2 * links[1].alpha_seconds),
            capacity_bytes,
            number,
            schedule,
            shared,
            min_stages=self.min_stages,
            max_stages=self.max_stages,
        )

    def _look_at_guessed(self, stages: FoundStages) -> bool:
        """Plan the layers that stages stand on; False if all were planned.

        Those of the main kind are planned before the others.
        """
        costs, number = self.costs, stages.problem.num_microbatches
        labels, main = stages.labels(), self.costs.main_kind
        wanted = [
            (label, main) for label in labels if not costs.is_known(label, number, main)
        ]
        if not wanted:
            spans = zip(labels, stages.assignment.stages, strict=True)
            wanted = [
                (label, kind)
                for label, stage in spans
                for kind in costs.layers.kinds[stage.first : stage.end]
                if not costs.is_known(label, number, kind)
            ]
        for label, kind in dict.fromkeys(wanted):
            self._timed("layers", lambda s=label, k=kind: costs.look_at(s, number, k))
        return bool(wanted)

    def _timed(self, name: str, work: Callable[[], _Result]) -> _Result:
        start = process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + process_time() - start
        self.count[name] = self.count.get(name, 0) + 1
        return result


def submeshes_of(
    cluster: Cluster, options: Options, batch_size: int
) -> Iterator[Submesh]:
    """Parts of a host, and whole hosts of a kind, in shapes of up to two axes.

    They have the axes that layout rules name.
    """
    if cluster.parts:
        for number, part in enumerate(cluster.parts):
            for each in submeshes_of(part, options, batch_size):
                yield replace(each, part=number)
            for mesh in _given(_shapes(part), part.num_devices, options):
                yield Submesh(mesh, False, number)
                yield Submesh(mesh, True, number)
        return
    inside = cluster.devices_per_host

    def may_be_split(size: int) -> bool:
        return batch_size % size == 0 and size & (size - 1) != 0

    shapes = {
        size: _shapes(replace(cluster, num_hosts=1, devices_per_host=size))
        for size in range(1, inside + 1)
        if inside % size == 0 or may_be_split(size)
    }
    for number in range(2, cluster.num_hosts):
        if cluster.num_hosts % number == 0 or may_be_split(number):
            shapes[number * inside] = _shapes(replace(cluster, num_hosts=number))
    for size, meshes in sorted(shapes.items()):
        if size >= cluster.num_devices:
            continue
        for mesh in _given(meshes, size, options):
            yield Submesh(mesh, False)
            if mesh.size > 1:
                yield Submesh(mesh, True)


def _given(
    meshes: Sequence[MeshShape], size: int, options: Options
) -> Sequence[MeshShape]:
    """The shapes of a size, or the one that was asked for."""
    if options.mesh is None:
        rules = () if options.rules is None else options.rules.axes_by_name().values()
        named = {axis for axes in rules for axis in axes}
        return [each for each in meshes if named.issubset(each.axis_names)]
    try:
        return [parse_mesh(options.mesh, size)]
    except ValueError:  # a shape of another size
        return ()


def _shapes(cluster: Cluster) -> list[MeshShape]:
    if cluster.num_devices == 1:
        return [MeshShape(("x",), (1,))]
    return list(mesh_shapes(cluster, 2))
