"""Search stages, their submeshes, the number of microbatches and the schedule together.

The solver (`solver/stage_dp.py`) takes what spans of layers cost from `span_costs.py`.
Costs start as bounds; the submeshes of the best stages are then planned, and the search
is repeated, until all that the best stages stand on was planned. What it finds is
planned in full. If that holds more than was thought, capacity is lowered by the error
and the search goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any

import jax
import numpy as np

from autopar.solver.stage_dp import StageAssignment, best_over
from autopar.solver.stage_problem import ScheduleName, StageChoice, StageProblem

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..methods.methods import PipelineParallel
from ..microbatches.microbatches import batch_size_of
from ..options import Options
from ..planner.mesh_search import mesh_shapes
from ..planner.planning import batch_tensors, budget_of, roles_of
from ..plans.explain import format_bytes, format_seconds
from ..plans.parallel_plan import Plan
from ..sharding.mesh import MeshShape, parse_mesh
from .cut_step import cut_step
from .layers import find_layers
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .span_costs import LayerSample, SpanCosts, Submesh, sample_layers
from .stage_cut import work_line
from .stage_planner import StagePlanner

LOOSE_GAP = 0.01
MOST_COUNTS = 8  # numbers of microbatches that are tried
MOST_MICROBATCHES = 16  # for each device
MOST_TRIES = 4  # plans in full, until one fits
SAFETY = 0.98

_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class StageSearch:
    """The pipeline found, its plan, and how long the parts of the search took."""

    planned: PlannedPipeline
    plan: Plan
    seconds: Mapping[str, float]


def search_stages(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: PipelineParallel,
    options: Options,
    price: Callable[[PlannedPipeline], Plan],
    below_seconds: float = inf,
) -> StageSearch | None:
    """The fastest pipeline of a step within memory; None if none beats `below_seconds`.

    Arguments:
      method: what it leaves out is searched.
      price: the plan of a pipeline, with the time and memory of a simulated step.

    Raises:
      InfeasiblePlanError: no stages fit into memory; names what takes the most.
      BatchCoupledError: the step cannot be cut into microbatches.
      ValueError: it cannot be cut into two stages.
    """
    return _Search(fun, args, kwargs, method, options, price, below_seconds).run()


class _Search:
    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        method: PipelineParallel,
        options: Options,
        price: Callable[[PlannedPipeline], Plan],
        below_seconds: float,
    ) -> None:
        self.call = fun, args, kwargs
        self.method, self.options, self.price = method, options, price
        self.below_seconds = below_seconds
        self.cluster = options.cluster or Cluster.local()
        self.planner = StagePlanner(self.cluster)
        self.budget_bytes = budget_of(options, self.cluster)
        self.seconds: dict[str, float] = {}
        start = perf_counter()
        self.whole = trace(*self.call)
        self.graph = build_graph(self.whole, roles_of(self.whole))
        self.batch = batch_tensors(self.whole, self.graph, options)
        held = [i.tensor for i in self.graph.inputs if i.tensor not in self.batch]
        self.layers = find_layers(work_line(self.graph, held))
        self._note("trace", start)
        if len(self.layers) < 2:
            raise ValueError(
                f"A pipeline has two stages or more, but the forward pass of "
                f"{self.whole.name!r} has {len(self.layers)} layers that can be apart; "
                f"use autopar.ShardParallel()."
            )

    def _note(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def run(self) -> StageSearch | None:
        counts = self._microbatch_counts()
        start = perf_counter()
        ends = (counts[0], counts[-1])
        costs = SpanCosts(
            self.layers,
            self.cluster,
            {number: self._samples(number) for number in dict.fromkeys(ends)},
        )
        self._note("cut", start)
        capacity = self.budget_bytes * SAFETY
        best: StageSearch | None = None
        least: Plan | None = None
        for _ in range(MOST_TRIES):
            found = self._solve(costs, counts, capacity)
            if found is None:
                break
            problem, assignment = found
            start = perf_counter()
            planned = self._plan(problem, assignment)
            plan = self.price(planned)
            self._note("plan", start)
            predicted = plan.predicted
            _log.info(
                "%s: %d stages thought to take %s take %s, %s a device",
                *(self.whole.name, len(assignment.stages)),
                *map(format_seconds, (assignment.seconds, predicted.step_seconds)),
                format_bytes(predicted.peak_bytes),
            )
            if predicted.peak_bytes <= self.budget_bytes:
                best = StageSearch(planned, plan, self.seconds)
                break
            if least is None or predicted.peak_bytes < least.predicted.peak_bytes:
                least = plan
            capacity *= 0.99 * self.budget_bytes / predicted.peak_bytes
        if best is None and self.below_seconds == inf:
            raise self._infeasible(costs, counts, least)
        if best is None or best.plan.predicted.step_seconds >= self.below_seconds:
            return None
        return best

    def _microbatch_counts(self) -> tuple[int, ...]:
        """The numbers of microbatches to try, ascending: divisors, at least doubling.

        Raises:
          ValueError: the number that was asked for does not divide the batch.
        """
        given = self.method.num_microbatches
        if given is None and self.options.num_microbatches > 1:
            given = self.options.num_microbatches
        size = batch_size_of(self.graph, self.batch, given or 1)
        if given is not None:
            return (given,)
        most = min(size, MOST_MICROBATCHES * self.cluster.num_devices)
        counts: list[int] = []
        for number in range(2, most + 1):
            if size % number == 0 and (not counts or number >= 2 * counts[-1]):
                counts.append(number)
        return tuple(counts[-MOST_COUNTS:]) or (1,)

    def _samples(self, number: int) -> tuple[LayerSample, ...]:
        """A stage for each kind of layer, of a step of so many microbatches."""
        spans = sorted(self.layers.samples())
        borders = sorted({0, len(self.layers), *(b for span in spans for b in span)})
        stages = list(pairwise(borders))
        method = replace(
            self.method,
            num_stages=len(stages),
            num_microbatches=number,
            schedule="1f1b",
            stages_per_submesh=1,
            stage_meshes=None,
            stage_products=self.layers.stage_products([end for _, end in stages]),
        )
        fun, args, kwargs = self.call
        leaves = jax.tree.leaves((args, kwargs))
        made = cut_step(fun, self.whole, leaves, method, self.options)
        chosen = {stages.index(span): span[1] - span[0] for span in spans}
        return sample_layers(made, chosen, self.options, self.planner)

    def _submeshes(self) -> Iterator[Submesh]:
        """Parts of a host, and whole hosts, in all shapes of up to two axes."""
        cluster, inside = self.cluster, self.cluster.devices_per_host
        shapes = {
            size: _shapes(replace(cluster, num_hosts=1, devices_per_host=size))
            for size in range(1, inside + 1)
            if inside % size == 0 or self._divides(size)
        }
        for number in range(2, cluster.num_hosts):
            if cluster.num_hosts % number == 0 or self._divides(number):
                shapes[number * inside] = _shapes(replace(cluster, num_hosts=number))
        for size, meshes in sorted(shapes.items()):
            if size >= cluster.num_devices:
                continue
            if self.options.mesh is not None:
                try:
                    meshes = [parse_mesh(self.options.mesh, size)]
                except ValueError:  # a shape of another size
                    continue
            for mesh in meshes:
                yield Submesh(mesh, False)
                if mesh.size > 1:
                    yield Submesh(mesh, True)

    def _divides(self, size: int) -> bool:
        """Whether the batch could be split into so many parts."""
        (rows,) = {self.graph.tensors[t].type.shape[0] for t in self.batch}
        return rows % size == 0 and size & (size - 1) != 0

    def _solve(
        self, costs: SpanCosts, counts: Sequence[int], capacity: float
    ) -> tuple[StageProblem, StageAssignment] | None:
        """The best stages, all of whose submeshes were planned."""
        cluster = self.cluster
        submeshes = list(self._submeshes())
        links = cluster.host_link, cluster.network_link
        problem = StageProblem(
            len(self.layers),
            (0,) * cluster.num_hosts,
            cluster.devices_per_host,
            (),
            np.zeros((2, len(self.layers) + 1)),
            (2 * links[0].alpha_seconds, 2 * links[1].alpha_seconds),
            capacity,
            1,
            min_stages=2,
        )
        shared = (np.array(self.layers.crossing_bytes) * 2)[None, :]
        per_byte = np.array([[each.seconds_per_byte] for each in links])

        def choices_of(number: int) -> tuple[tuple[StageChoice, ...], np.ndarray]:
            choices = tuple(costs.choice(each, number) for each in submeshes)
            return choices, per_byte * shared / number

        while True:
            start = perf_counter()
            found = best_over(problem, choices_of, counts, self._schedules(), LOOSE_GAP)
            self._note("solve", start)
            if found is None:
                return None
            solved, assignment = found
            labels = {solved.choices[each.choice].label for each in assignment.stages}
            unknown = used = [each for each in submeshes if each in labels]
            number = solved.num_microbatches
            is_new = number not in costs.samples
            unknown = [each for each in unknown if not costs.is_known(each, number)]
            if not unknown and not is_new:
                return found
            start = perf_counter()
            if is_new and all(costs.is_known(each, counts[0]) for each in used):
                costs.samples[number] = self._samples(number)
            for each in unknown:
                costs.look_at(each)
            self._note("layers", start)

    def _schedules(self) -> tuple[tuple[ScheduleName, int], ...]:
        """What to try: plain and interleaved 1F1B, unless a schedule was asked for."""
        schedule, shared = self.method.schedule, self.method.stages_per_submesh
        if schedule == "gpipe":
            return (("gpipe", 1),)
        if schedule == "interleaved":
            return (("interleaved", max(shared, 2)),)
        if schedule == "1f1b":
            return (("1f1b", 1), ("interleaved", 2))
        return (("1f1b", 1),)

    def _plan(
        self, problem: StageProblem, assignment: StageAssignment
    ) -> PlannedPipeline:
        stages = assignment.stages
        labels: list[Any] = [problem.choices[each.choice].label for each in stages]
        number = len(stages) // problem.stages_per_submesh
        is_shared = problem.schedule == "interleaved"
        method = replace(
            self.method,
            num_stages=len(stages),
            num_microbatches=problem.num_microbatches,
            schedule="interleaved" if is_shared else self.method.schedule,
            stages_per_submesh=problem.stages_per_submesh,
            stage_meshes=tuple(label.mesh for label in labels[:number]),
            stage_products=self.layers.stage_products([each.end for each in stages]),
        )
        split = [i for i, label in enumerate(labels) if label.is_split]
        return plan_pipeline(
            *self.call,
            method,
            self.options,
            whole=self.whole,
            split=split,
            planner=self.planner,
        )

    def _infeasible(
        self, costs: SpanCosts, counts: Sequence[int], least: Plan | None
    ) -> InfeasiblePlanError:
        """What stands in the way: the layer that takes the most on its submesh."""
        budget = format_bytes(self.budget_bytes)
        if least is not None:
            peaks = least.stages.peak_bytes
            submesh = int(np.argmax(peaks))
            return InfeasiblePlanError(
                f"A pipeline must fit into {budget} a device, but the least found has "
                f"{format_bytes(max(peaks))} on submesh {submesh} (stage {submesh} of "
                f"{least.stages.num_stages}); allow that much, or use more devices or "
                f"jax.checkpoint.",
                max(peaks),
                f"memory of stage {submesh}",
            )
        layers, cluster = self.layers, self.cluster
        largest = max(self._submeshes(), key=lambda each: each.mesh.size)
        held = [costs.cost(largest, counts[-1], kind) for kind in layers.kinds]
        heaviest = int(np.argmax([c.state_bytes + c.gradient_bytes for c in held]))
        worst, total = held[heaviest], sum(c.state_bytes for c in held)
        share = largest.mesh.size / cluster.num_devices
        return InfeasiblePlanError(
            f"A pipeline must fit into {budget} a device, but no stages do: split over "
            f"all {cluster.num_devices} devices the state alone takes "
            f"{format_bytes(round(total * share))} a device, and layer {heaviest} of "
            f"{len(layers)} on {largest} takes "
            f"{format_bytes(round(worst.state_bytes))} of state, "
            f"{format_bytes(round(worst.gradient_bytes))} of gradients and "
            f"{format_bytes(round(worst.microbatch_bytes))} for each microbatch in "
            f"flight; use more devices, or jax.checkpoint.",
            round(total * share),
            f"memory of layer {heaviest}",
        )


def _shapes(cluster: Cluster) -> list[MeshShape]:
    if cluster.num_devices == 1:
        return [MeshShape(("x",), (1,))]
    return list(mesh_shapes(cluster, 2))
