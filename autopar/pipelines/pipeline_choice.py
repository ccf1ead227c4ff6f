"""Which pipeline a step becomes: as asked for, searched, like an earlier one, or none.

`autopar.Auto` looks for a pipeline where it can pay: across hosts, if intra-operator
parallelism alone is far from its floor, or where nothing else fits into memory. On one
host links are fast, and a small model stays as quick to plan as with `jax.jit`. Where
the user names a mesh, rules or pins by axes, there is no search. A step that cannot be
cut just gets no pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..methods.methods import Auto, PipelineParallel, method_of_plan
from ..methods.place_operators import PlaceOperators
from ..option_values import LEVELS, Offload
from ..options import Options
from ..planner.fit import CompiledFit
from ..planner.mesh_search import FAR, least_seconds
from ..planner.plan_like import homes_in, kept_pins
from ..planner.planned import Planned
from ..planner.planning import plan_of_least_memory, plan_step
from ..planner.whole_step import batch_tensors, roles_of
from ..plans.explain import format_seconds
from ..plans.plan import Prediction
from ..plans.staged_plan import StagedPlan, stages_of
from ..transforms.update_loops import one_update
from .pipeline import lower_pipeline
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .placed_operators import plan_placement
from .program_plans import ProgramPlanner
from .stage_cut import forward_order
from .stage_search import StageSearcher, infeasible_stage

MOST_OPERATORS = 40_000
"""How many operators of a step Auto searches stages for.

The search and the plan in full take about 0.6 ms of CPU for each operator; devices
hardly count.
"""

_log = logging.getLogger("autopar")
_CHUNK = r"\[\d+:\d+\]$"  # of a path, where a leaf comes in chunks

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
Price = Callable[[PlannedPipeline], StagedPlan]


def planned_pipeline(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The pipeline that `method` asks for; what it leaves out is searched.

    That of a step of several updates is of one of them.

    Raises:
      InfeasiblePlanError: no stages fit into memory.
    """
    try:
        return _fitting(call, method, options, price)
    except (ValueError, NotImplementedError):
        traced = trace(*call)
        graph = build_graph(traced, roles_of(traced))
        found = one_update(call, traced, graph)
        if found is None:
            raise
    is_on_ray = options.cluster is not None and options.cluster.ray_hosts is not None
    if is_on_ray or method.microbatch_semantics != "exact":
        raise ValueError(
            f"Stages run several updates a call on local devices and in exact "
            f"microbatches alone; call the step once an update, not in {found[2]}."
        )
    planned = planned_pipeline(found[0], method, options, price)
    return replace(planned, updates=(found[1], *planned.updates))


@dataclass(frozen=True, eq=False)
class _StagedCandidate:
    """A planned pipeline, and its plan, whose stages are compiled."""

    planned: PlannedPipeline
    stages: StagedPlan

    @property
    def name(self) -> str:
        return self.planned.traced.name

    @property
    def cluster(self) -> Cluster:
        return self.planned.cluster

    @property
    def num_devices(self) -> int:
        return sum(shape.size for shape in self.planned.shapes)

    @property
    def predicted(self) -> Prediction:
        return self.stages.predicted

    def compiled_bytes(self, limit_seconds: float) -> int:
        pipeline = lower_pipeline(self.planned)
        return max(pipeline.compiled_peaks(self.stages, limit_seconds))


def _fitting(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """A pipeline within a budget that was named, also as compiled."""
    if options.memory_budget is None or options.plan is not None:
        return _planned(call, method, options, price)
    fit = CompiledFit[_StagedCandidate](options)
    for some in fit:
        try:
            planned = _planned(call, method, some, price)
            fit.add(_StagedCandidate(planned, price(planned)))
        except InfeasiblePlanError as error:
            fit.add(error)
    found, predicted = fit.result
    return replace(found.planned, memory_correction=predicted.memory_correction)


def _planned(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    if options.like is not None:
        return pipeline_like(call, method, options, price)
    if method.num_stages is not None:
        if not _may_have_unequal_submeshes(method, options):
            return fitting_pipeline(call, method, options, price)
        number = method.num_microbatches or options.num_microbatches
        method = replace(method, num_microbatches=number)
    return _searched(call, method, options, price)


def _searched(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The fastest pipeline within memory, with what "auto" leaves to us if need be."""

    def find(chosen: Options) -> _StagedCandidate:
        found = StageSearcher(call, method, chosen).run(price)
        assert found is not None, "an unlimited search finds one or says why not"
        return _StagedCandidate(found.planned, found.plan)

    found = _of_auto(options, find)
    best = min(found, key=lambda each: each.predicted.step_seconds).planned
    bounds = [each.planned.bound_seconds for each in found]
    return replace(best, bound_seconds=min(bounds))


def _of_auto(
    options: Options, find: Callable[[Options], _StagedCandidate]
) -> list[_StagedCandidate]:
    """The pipelines that fit, with values for `remat` and `offload` where "auto".

    What makes nothing again and keeps all state on devices is taken if it fits: all
    others do more work. If not, the levels of `remat`; and only then the host keeps the
    optimizer's state.

    Raises:
      InfeasiblePlanError: none fits; it is that of the least memory.
    """
    levels = [None, *LEVELS] if options.remat == "auto" else [options.remat]
    hosts: list[Offload | None] = [options.offload]
    if options.offload == "auto":
        hosts = [None, "optimizer_state"]
    errors: list[InfeasiblePlanError] = []
    for host in hosts:
        found: list[_StagedCandidate] = []
        for level in levels:
            try:
                found.append(find(replace(options, remat=level, offload=host)))
            except InfeasiblePlanError as error:
                errors.append(error)
            except ValueError:
                if not errors or host == hosts[0]:
                    raise
                break  # there is no such state
            if found and level is None:
                break
        if found:
            return found
    raise min(errors, key=lambda each: each.least_budget_bytes or inf)


def plan_call(
    call: Call, options: Options, price: Price, elsewhere_seconds: float = 0.0
) -> Planned | PlannedPipeline:
    """The plan of a call, as the method says: of one program, or of a pipeline.

    Where nothing fits devices as they are, it is the one that needs the least.
    `elsewhere_seconds` are those of `plan_step`.

    Raises:
      InfeasiblePlanError: nothing fits into memory.
    """
    if isinstance(options.method, PipelineParallel):
        return planned_pipeline(call, options.method, options, price)
    if isinstance(options.method, PlaceOperators):
        return plan_placement(*call, options.method, options)
    is_open = isinstance(options.method, Auto) and _is_open(options)
    found = None
    try:
        one = plan_step(*call, options, elsewhere_seconds=elsewhere_seconds)
    except InfeasiblePlanError as error:
        if is_open:
            found = _pipeline_that_fits(call, options, error, price)
        return found or plan_of_least_memory(*call, options, error)
    if is_open:
        found = _quicker_pipeline(call, options, one, price)
    return found or one


def _pipeline_that_fits(
    call: Call, options: Options, error: InfeasiblePlanError, price: Price
) -> PlannedPipeline | None:
    """The pipeline that fits where one program does not, if there is any."""
    graph = build_graph(traced := trace(*call), roles_of(traced))
    found = None if _is_large(graph) else _search(call, options, price)
    if found is not None:
        _log.warning(
            "%s becomes a pipeline, as no other plan was found that fits (%s)",
            *(traced.name, error.tightest_constraint),
        )
    return found


def _quicker_pipeline(
    call: Call, options: Options, planned: Planned, price: Price
) -> PlannedPipeline | None:
    """The pipeline that beats one program on all devices, if there is any."""
    cluster, one = planned.cluster, planned.plan.predicted
    seconds = one.step_seconds
    floor_seconds = least_seconds(planned.graph, cluster)
    if cluster.num_hosts == 1 or seconds <= FAR * floor_seconds:
        return None
    if _is_large(planned.graph):
        return None
    found = _search(call, options, price, seconds)
    if found is None:
        return None
    _log.info("a pipeline: one program takes %s", format_seconds(seconds))
    least = min(found.bound_seconds, seconds * (1 - one.optimality_gap))
    return replace(found, bound_seconds=least, one_program=one)


def _may_have_unequal_submeshes(method: PipelineParallel, options: Options) -> bool:
    """Whether stages do not divide the devices, and the search may deal them out."""
    number = method.num_stages
    devices = (options.cluster or Cluster.local()).num_devices
    said = (method.stage_meshes, method.stage_products, method.layer_costs)
    return (
        number is not None
        and number < devices
        and devices % number != 0
        and method.stages_per_submesh == 1
        and options.plan is None
        and all(each is None for each in said)
    )


def _is_open(options: Options) -> bool:
    """Whether the user left it to us what runs where."""
    names_axes = any(entry for spec in options.pins.values() for entry in spec or ())
    given = (options.plan, options.mesh, options.rules, options.remat, options.offload)
    return not names_axes and all(each is None for each in given)


def _is_large(graph: OpGraph) -> bool:
    """Whether a pipeline would take a minute or more to plan; says so."""
    number = len(graph.operators())
    if number <= MOST_OPERATORS:
        return False
    _log.warning(
        "no pipeline is looked for in a step of %d operators, as planning one takes a "
        "minute or more for now; PipelineParallel() searches all the same, and "
        "PipelineParallel(num_stages=...) needs no search",
        number,
    )
    return True


def _search(
    call: Call, options: Options, price: Price, below_seconds: float = inf
) -> PlannedPipeline | None:
    if options.cluster is None and Cluster.local().num_hosts > 1:
        return None  # stages are not run across processes but on Ray
    try:
        searcher = StageSearcher(call, PipelineParallel(), options)
        found = searcher.run(price, below_seconds)
    except (ValueError, NotImplementedError) as error:
        _log.info("no pipeline: %s", error)
        return None
    return None if found is None else found.planned


def fitting_pipeline(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The pipeline that `method` asks for, whose stages fit into the budget.

    If they do not, they are planned again with state in as many parts as a stage has
    devices, and with what "auto" leaves to us.

    Raises:
      InfeasiblePlanError: a stage does not fit; names it and what takes its memory.
    """
    is_auto = "auto" in (options.remat, options.offload)
    if options.plan is not None or not (options.memory_budget or is_auto):
        return plan_pipeline(*call, method, options)
    budget_bytes = options.budget_on(options.cluster or Cluster.local())
    planner, whole = ProgramPlanner(), trace(*call)

    def find(chosen: Options) -> _StagedCandidate:
        tries: list[_StagedCandidate] = []
        for split in ((), range(method.num_stages or 2)):
            asked = *call, method, chosen
            found = plan_pipeline(*asked, whole=whole, split=split, planner=planner)
            tries.append(_StagedCandidate(found, price(found)))
            if tries[-1].predicted.peak_bytes <= budget_bytes:
                return tries[-1]
        least = min(tries, key=lambda each: each.predicted.peak_bytes)
        raise infeasible_stage(least.planned, least.stages, budget_bytes)

    found = _of_auto(options, find)
    return min(found, key=lambda each: each.predicted.step_seconds).planned


def pipeline_like(
    call: Call,
    method: PipelineParallel,
    options: Options,
    price: Callable[[PlannedPipeline], StagedPlan],
) -> PlannedPipeline:
    """The pipeline of a step that keeps what it can of `options.like`.

    A plan of this very step that fits the budget is taken as it is. What was kept is
    logged, as a warning if anything could not be.

    Raises:
      InfeasiblePlanError: stages do not fit into memory so.
    """
    assert options.like is not None
    like = stages_of(options.like)
    free = replace(options, like=None)
    unchanged = _unchanged(call, method, free, like)
    if unchanged is not None:
        return unchanged
    traced = trace(*call)
    graph = build_graph(traced, roles_of(traced))
    batch = batch_tensors(traced, graph, options)
    held = [each.tensor for each in graph.inputs if each.tensor not in batch]
    number = forward_order(graph, held).num_products
    if method.stage_products is not None and sum(method.stage_products) != number:
        method = replace(method, stage_products=None)
    homes = homes_in((each.sharding for each in like.programs), _CHUNK)
    pins = kept_pins(graph, options.pins, homes, like.meshes)
    remat = next((p.sharding.remat for p in like.programs if p.sharding.remat), None)
    free = replace(
        free,
        pins={**pins, **options.pins},
        remat=options.remat or remat,
        method=method,
    )
    return fitting_pipeline(call, method, free, price)


def _unchanged(
    call: Call, method: PipelineParallel, options: Options, like: StagedPlan
) -> PlannedPipeline | None:
    """The pipeline of the plan itself, if that is of this very step and fits."""
    cluster = options.cluster or Cluster.local()
    budget = options.memory_budget
    if options.pins or like.cluster != cluster.name or method != method_of_plan(like):
        return None
    if budget is not None and max(like.peak_bytes) > budget:
        return None
    try:
        return plan_pipeline(*call, method, replace(options, plan=like))
    except ValueError:  # of another step, with other products, or of more devices
        return None
