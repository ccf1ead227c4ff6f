"""Search stages, their submeshes, the number of microbatches and the schedule together.

A step is cut into layers (`layers.py`), which are sampled (`layer_samples.py`) and
planned where the search (`joint_search.py`) asks for it. The stages that it finds are
planned in full. If that holds more than was thought, capacity is lowered by the error
and the search goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from time import process_time
from typing import Any, get_args

import jax
import numpy as np

from autopar.solver.stage_problem import ZERO_BUBBLE, ScheduleName

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..methods.methods import PipelineParallel
from ..microbatches.microbatches import batch_size_of
from ..options import Options
from ..planner.whole_step import batch_tensors, roles_of
from ..plans.explain import format_bytes, format_seconds
from ..plans.staged_plan import StagedPlan
from .cut_step import CutStep, cut_step
from .joint_search import LOOSE_GAP, FoundStages, JointSearch, submeshes_of
from .layer_samples import LayerSamples
from .layers import find_layers
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .program_plans import ProgramPlanner
from .span_costs import SpanCosts
from .stage_cut import forward_order

MOST_COUNTS = 8  # numbers of microbatches that are tried
MOST_MICROBATCHES = 16  # for each device
MOST_TRIES = 4  # plans in full, until one fits
SAFETY = 0.98
JOINT_GAP = 0.003  # below that of the search

_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class StageSearch:
    """The pipeline found, its plan, and how long the parts of the search took.

    `found` is what the search thought of it, `search` what it knew in the end.
    """

    planned: PlannedPipeline
    plan: StagedPlan
    seconds: Mapping[str, float]
    found: FoundStages
    search: JointSearch


class StageSearcher:
    """A step that is cut into layers, to be searched; `method` says what is open.

    `seconds` are CPU seconds by phase.

    Raises:
      BatchCoupledError: the step cannot be cut into microbatches.
      ValueError: it cannot be cut into two stages.
    """

    def __init__(
        self,
        call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
        method: PipelineParallel,
        options: Options,
    ) -> None:
        self.call = call
        self.method, self.options = method, options
        self.cluster = options.cluster or Cluster.local()
        self.planner = ProgramPlanner(JOINT_GAP)
        self.budget_bytes = options.budget_on(self.cluster)
        self.seconds: dict[str, float] = {}
        start = process_time()
        self.whole = trace(*self.call)
        self.graph = build_graph(self.whole, roles_of(self.whole))
        self.batch = batch_tensors(self.whole, self.graph, options)
        held = [i.tensor for i in self.graph.inputs if i.tensor not in self.batch]
        self.layers = find_layers(forward_order(self.graph, held))
        self._note("trace", start)
        number, asked = len(self.layers), method.num_stages
        if number < (asked or 2):
            wanted = "two stages or more" if asked is None else f"{asked} stages here"
            fewer = f"at most num_stages={number}, or " if number > 1 else ""
            if asked:
                fewer += "`stage_meshes`, with which stages begin at any product, or "
            raise ValueError(
                f"A pipeline has {wanted}, but the forward pass of {self.whole.name!r} "
                f"has {number} layers that can be apart; use {fewer}"
                f"autopar.ShardParallel()."
            )

    def _note(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + process_time() - start

    @property
    def capacity_bytes(self) -> float:
        """What stages may hold a device in the model of costs."""
        return self.budget_bytes * SAFETY

    def search(self) -> JointSearch:
        """The search over all that the method leaves open, nothing planned yet."""
        counts = self._microbatch_counts()
        start = process_time()
        samples = self.samples(self.options.microbatch_semantics == "exact")
        samples.of(counts[0])
        self._note("cut", start)
        costs = SpanCosts(self.layers, self.cluster, samples)
        rows = batch_size_of(self.graph, self.batch, 1)
        submeshes = list(submeshes_of(self.cluster, self.options, rows))
        if not submeshes and self.options.rules and self.options.mesh is None:
            raise ValueError(
                f"Layout rules name axes of the submeshes, which are x and y where "
                f"`mesh` is left out, but got {self.options.rules}; use these, or give "
                f"`mesh`, such as 'data:-1;model:2'."
            )
        if not submeshes:
            raise ValueError(
                f"A stage has fewer devices than there are, but there are "
                f"{self.cluster.num_devices}, and `mesh` is {self.options.mesh!r}; "
                f"leave `mesh` out, use more devices, or autopar.ShardParallel()."
            )
        schedules = self._schedules()
        given = self.method.num_stages
        wanted = (given or 2) * min(each.mesh.size for each in submeshes)
        if wanted > self.cluster.num_devices:
            raise ValueError(
                f"Every stage has devices of its own, but {given or 2} stages of "
                f"`mesh` {self.options.mesh!r} need {wanted}, and there are "
                f"{self.cluster.num_devices}; make `mesh` smaller or leave it out."
            )
        return JointSearch(
            *(costs, self.cluster, submeshes, counts, schedules, self.seconds),
            min_stages=given or 2,
            max_stages=given,
        )

    def run(
        self, price: Callable[[PlannedPipeline], StagedPlan], below_seconds: float = inf
    ) -> StageSearch | None:
        """The fastest pipeline within memory; None if none beats `below_seconds`.

        `price` is the plan of a pipeline, with time and memory of a simulated step.

        Raises:
          InfeasiblePlanError: no stages fit; names what takes the most.
        """
        search, capacity = self.search(), self.capacity_bytes
        best: StageSearch | None = None
        least: StageSearch | None = None
        bound_seconds = inf  # that of all the capacity is the least
        for _ in range(MOST_TRIES):
            found = search.best(capacity)
            if found is None:
                break
            bound_seconds = min(bound_seconds, found.bound_seconds)
            found = replace(found, bound_seconds=bound_seconds)
            each = self._priced(found, search, price)
            predicted = each.plan.predicted
            if predicted.peak_bytes <= self.budget_bytes:
                best = self._quicker(each, price, capacity)
                break
            if least is None or (
                predicted.peak_bytes < least.plan.predicted.peak_bytes
            ):
                least = each
            capacity *= 0.99 * self.budget_bytes / predicted.peak_bytes
        if best is None and below_seconds == inf:
            if least is not None:
                raise infeasible_stage(least.planned, least.plan, self.budget_bytes)
            if search.costs.refused:
                raise search.costs.refused[0]
            raise self._infeasible(search)
        if best is None or best.plan.predicted.step_seconds >= below_seconds:
            return None
        return best

    def _priced(
        self,
        found: FoundStages,
        search: JointSearch,
        price: Callable[[PlannedPipeline], StagedPlan],
    ) -> StageSearch:
        start = process_time()
        planned = replace(self.plan(found), bound_seconds=found.bound_seconds)
        plan = price(planned)
        self._note("plan", start)
        _log.info(
            "%s: %d stages thought to take %s take %s, %s a device",
            *(self.whole.name, len(found.assignment.stages)),
            format_seconds(found.assignment.seconds),
            format_seconds(plan.predicted.step_seconds),
            format_bytes(plan.predicted.peak_bytes),
        )
        return StageSearch(planned, plan, self.seconds, found, search)

    def _quicker(
        self,
        first: StageSearch,
        price: Callable[[PlannedPipeline], StagedPlan],
        capacity_bytes: float,
    ) -> StageSearch:
        """A pipeline, or where zero bubble takes longer than it was thought to, the
        best of another schedule if that is quicker."""
        search, seconds = first.search, first.plan.predicted.step_seconds
        others = [each for each in search.schedules if each[0] not in ZERO_BUBBLE]
        is_as_thought = seconds <= first.found.assignment.seconds * (1 + LOOSE_GAP)
        if first.found.problem.schedule not in ZERO_BUBBLE or is_as_thought:
            return first
        found = (
            replace(search, schedules=others).best(capacity_bytes) if others else None
        )
        if found is None or found.assignment.seconds >= seconds:
            return first
        found = replace(found, bound_seconds=first.found.bound_seconds)
        other = self._priced(found, search, price)
        predicted = other.plan.predicted
        is_within = predicted.peak_bytes <= self.budget_bytes
        return other if is_within and predicted.step_seconds < seconds else first

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

    def samples(self, in_place: bool) -> LayerSamples:
        """A stage for each kind of layer; cut once if `in_place`, else each number."""
        samples = self.layers.samples()
        borders = {0, len(self.layers), *samples, *(first + 1 for first in samples)}
        stages = list(pairwise(sorted(borders)))
        products = self.layers.stage_products([end for _, end in stages])
        keeps_last = self.method.schedule in ("1f1b", "eager_1f1b")  # under `remat`

        def cut(number: int) -> CutStep:
            method = replace(
                self.method,
                num_stages=len(stages),
                num_microbatches=number,
                schedule="1f1b" if keeps_last else "gpipe",
                stages_per_submesh=1,
                stage_meshes=None,
                stage_products=products,
            )
            asked = self.call[0], self.whole, method, self.options, in_place
            return cut_step(*asked, self.graph)

        by_kind = [stages.index((first, first + 1)) for first in samples]
        leaves = jax.tree.leaves(self.call[1:])
        return LayerSamples(cut, by_kind, self.options, leaves, self.planner, in_place)

    def _schedules(self) -> tuple[tuple[ScheduleName, int], ...]:
        """What to try: all but GPipe, unless a schedule was asked for.

        What backward makes again under `remat` would wait for its W tasks, so zero
        bubble is left out there; a user's own schedule is taken to be like 1F1B.
        """
        schedule, shared = self.method.schedule, self.method.stages_per_submesh
        if schedule == "interleaved":
            return (("interleaved", max(shared, 2)),)
        if schedule == "1f1b" and self.method.num_stages is None:
            names: list[ScheduleName] = ["1f1b", "eager_1f1b"]
            names += () if self.options.remat else ZERO_BUBBLE
            return (*((name, 1) for name in names), ("interleaved", 2))
        known = [name for name in get_args(ScheduleName) if name == schedule]
        return ((known[0] if known else "1f1b", 1),)

    def plan(self, found: FoundStages) -> PlannedPipeline:
        """The stages found, each program planned in full."""
        problem, stages = found.problem, found.assignment.stages
        labels = found.labels()
        number = len(stages) // problem.stages_per_submesh
        is_open = self.method.schedule == "1f1b"
        method = replace(
            self.method,
            num_stages=len(stages),
            num_microbatches=problem.num_microbatches,
            schedule=problem.schedule if is_open else self.method.schedule,
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
            graph=self.graph,
            split=split,
            planner=self.planner,
        )

    def _infeasible(self, search: JointSearch) -> InfeasiblePlanError:
        """What stands in the way: the layer that takes the most on its submesh."""
        budget = format_bytes(self.budget_bytes)
        layers, cluster = self.layers, self.cluster
        largest = max(search.submeshes, key=lambda each: each.mesh.size)
        number = search.counts[-1]
        held = [search.costs.cost(largest, number, kind) for kind in layers.kinds]
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


_PARTS = {
    "state": "parameters and optimizer state",
    "gradient": "gradients",
    "activation": "values between programs",
    "batch": "batch",
}


def _held_bytes(planned: PlannedPipeline, submesh: int) -> dict[str, int]:
    """Bytes that one device of a submesh holds, by what for; one microbatch of each."""
    found: dict[str, int] = {}
    for name, stage in planned.specs:
        slot = planned.flow.slots.get(name)
        if planned.submesh(stage) != submesh or slot is None or slot.kind not in _PARTS:
            continue
        text = _PARTS[slot.kind]
        found[text] = found.get(text, 0) + planned.slot_bytes(name, stage)
    found["work inside of programs"] = planned.working_bytes(submesh)
    return found


def infeasible_stage(
    planned: PlannedPipeline, plan: StagedPlan, budget: int
) -> InfeasiblePlanError:
    """Says which stage takes the most of its devices, and what for."""
    peaks = plan.peak_bytes
    submesh = int(np.argmax(peaks))
    stages = [
        str(stage)
        for stage in range(planned.flow.num_stages)
        if planned.submesh(stage) == submesh
    ]
    held = sorted(_held_bytes(planned, submesh).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{text} {format_bytes(number)}" for text, number in held)
    where = f"stage{'s' * (len(stages) > 1)} {' and '.join(stages)}"
    return InfeasiblePlanError(
        f"Every stage must fit into `memory_budget`, {format_bytes(budget)} a device, "
        f"but {where} of {planned.traced.name!r} needs {format_bytes(peaks[submesh])} "
        f"at the least, split over {planned.shapes[submesh]}: {parts} (of one "
        f"microbatch; the schedule holds several); use more stages, microbatches or "
        f"devices, or jax.checkpoint, or let stages be searched: "
        f"autopar.PipelineParallel().",
        max(peaks),
        f"memory of {where}",
    )
