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

from autopar.solver.stage_problem import ScheduleName

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
from .joint_search import FoundStages, JointSearch, submeshes_of
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
WORTH_ZERO_BUBBLE = 0.05  # of a step that fills and drains the stages
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
                best = self._quicker(each, price)
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
        schedule: str | None = None,
    ) -> StageSearch:
        start = process_time()
        planned = self.plan(found, schedule)
        planned = replace(planned, bound_seconds=found.bound_seconds)
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
        self, first: StageSearch, price: Callable[[PlannedPipeline], StagedPlan]
    ) -> StageSearch:
        """A pipeline, or the same stages with zero bubble where that is quicker.

        Not where little time is left to win, nor under `remat`: what backward makes
        again would wait for its W tasks.
        """
        problem, number = first.found.problem, len(first.found.assignment.stages)
        filling = (number - 1) / (problem.num_microbatches + number - 1)
        is_open = self.method.schedule == "1f1b" and self.method.num_stages is None
        is_plain = is_open and problem.stages_per_submesh == 1
        if self.options.remat or not is_plain or filling < WORTH_ZERO_BUBBLE:
            return first
        best, least = first, first.found.bound_seconds * (1 - filling)
        found = replace(first.found, bound_seconds=least)
        for schedule in ("zb_h1", "zb_h2"):
            each = self._priced(found, first.search, price, schedule)
            ours, known = each.plan.predicted, best.plan.predicted
            is_within = ours.peak_bytes <= self.budget_bytes
            if is_within and ours.step_seconds < known.step_seconds:
                best = each
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
        """What to try: 1F1B in its three forms, unless a schedule was asked for.

        Zero bubble is taken to be like eager 1F1B, a user's own schedule like 1F1B.
        """
        schedule, shared = self.method.schedule, self.method.stages_per_submesh
        if schedule == "interleaved":
            return (("interleaved", max(shared, 2)),)
        if schedule == "1f1b" and self.method.num_stages is None:
            return ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2)
        if schedule in ("zb_h1", "zb_h2"):
            return (("eager_1f1b", 1),)
        known = [name for name in get_args(ScheduleName) if name == schedule]
        return ((known[0] if known else "1f1b", 1),)

    def plan(self, found: FoundStages, schedule: str | None = None) -> PlannedPipeline:
        """The stages found, each program planned in full, maybe in another schedule."""
        problem, stages = found.problem, found.assignment.stages
        labels = found.labels()
        number = len(stages) // problem.stages_per_submesh
        is_open = self.method.schedule == "1f1b"
        known = problem.schedule if is_open else self.method.schedule
        method = replace(
            self.method,
            num_stages=len(stages),
            num_microbatches=problem.num_microbatches,
            schedule=schedule or known,
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
        """No stages fit: what the largest submesh holds of all layers at the least."""
        largest = max(search.submeshes, key=lambda each: each.mesh.size)
        number, kinds = search.counts[-1], self.layers.kinds
        held = [search.costs.cost(largest, number, kind) for kind in kinds]
        share = largest.mesh.size / self.cluster.num_devices
        least = round(share * sum(each.state_bytes for each in held))
        gradients = round(share * sum(each.gradient_bytes for each in held))
        return InfeasiblePlanError(
            f"A pipeline must fit into {format_bytes(self.budget_bytes)} a device, but "
            f"no stages do: split over all {self.cluster.num_devices} devices the "
            f"state alone takes {format_bytes(least)} and gradients "
            f"{format_bytes(gradients)}; use more devices, or jax.checkpoint.",
            least,
            "memory of stages",
        )


def infeasible_stage(
    planned: PlannedPipeline, plan: StagedPlan, budget: int
) -> InfeasiblePlanError:
    """Says which submesh takes the most of its devices, and what for."""
    submesh = int(np.argmax(plan.peak_bytes))
    held: dict[str, int] = {}
    for name, stage in planned.specs:
        slot = planned.flow.slots.get(name)
        if slot is not None and planned.submesh(stage) == submesh:
            size = planned.slot_bytes(name, stage)
            held[slot.kind] = held.get(slot.kind, 0) + size
    held["gradients"] = held.pop("gradient", 0)
    held["work inside of programs"] = planned.working_bytes(submesh)
    largest = sorted(held.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{text} {format_bytes(number)}" for text, number in largest)
    return InfeasiblePlanError(
        f"Every stage must fit into `memory_budget`, {format_bytes(budget)} a device, "
        f"but stage {submesh} of {planned.traced.name!r} needs "
        f"{format_bytes(max(plan.peak_bytes))} at the least: {parts} (of one "
        f"microbatch; the schedule holds several); use more stages, microbatches or "
        f"devices, or jax.checkpoint.",
        max(plan.peak_bytes),
        f"memory of stage {submesh}",
    )
