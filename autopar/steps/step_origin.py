"""The steps that plans are of, and what is found out from them for a report."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from ..audit.audit import Audit
from ..costs.memory import memory_profile
from ..frontend.calls import Call, plain_function
from ..graph.build_graph import PINS, build_graph
from ..graph.op_graph import OpGraph
from ..methods.batch_dims import flow_of_step
from ..methods.methods import ShardParallel
from ..options import Options
from ..pipelines.pipeline_plan import PlannedPipeline
from ..pipelines.pipeline_source import PipelineSource
from ..planner.graph_plan import plan_graph
from ..planner.intra_op import warn_fallbacks
from ..planner.memory_users import memory_shares
from ..planner.pin_costs import PinCost, PinCosts
from ..planner.plan_request import PlanRequest
from ..planner.planned import Planned
from ..planner.reasons import Alternative
from ..planner.traced_step import traced_step
from ..planner.whole_step import batch_tensors, roles_of
from ..plans.plan import MemoryShares, TriedPlan
from ..plans.staged_plan import StagedPlan, with_budget
from ..report.compiled_figures import CompiledFigures
from ..report.findings import Findings, MemoryCurve, Section
from ..report.memory_curves import curve_of_program, curve_of_submesh
from ..report.method_comparison import compare
from ..sharding.constraints import warn_ignored_constraints
from ..sharding.mesh import MeshShape
from ..targets.target import why_modelled
from .compiling import compiled_figures, lowered_step
from .execution import held_by_submesh, pipelined_step, simulation_of, staged_plan
from .lowered_pipeline import LoweredPipeline
from .lowered_step import Lowered
from .parallel_plan import Plan

_NOT_ASKED = "it was not asked for; write the report again without {flag}=False."
_SLOTS = {"activation": "activations", "gradient": "gradients", "result": "results"}
_MANY_PINS = 12  # each is solved for anew


@dataclass(frozen=True, eq=False)
class StepOrigin:
    """The step of a plan of one program; `leaves` are types with their shardings."""

    planned: Planned
    leaves: tuple[Any, ...]
    options: Options

    def findings(self, *, alternatives: bool, audit: bool) -> Findings:
        """What there is to find; see `Findings`."""
        planned, options = self.planned, self.options
        graph, plan = planned.graph, planned.plan
        given = planned, self.leaves, options
        costs = partial(traced_step(*given).pin_costs, plan)
        inside = {op.source for op in graph.operators() if op.kind in PINS}
        asked = _Asked(alternatives, audit)
        correction = plan.predicted.memory_correction
        return Findings(
            method=_method_text(options),
            cluster=planned.cluster,
            kinds=_kinds(graph, batch_tensors(planned.traced, graph, options)),
            curves=(curve_of_program(memory_profile(graph, plan), correction),),
            alternatives=asked.others(lambda: [*compare(*given)][1:]),
            pins=asked.pins(len(options.pins) + len(inside), costs),
            audits=asked.audits(partial(lowered_step, planned)),
            cautions=(*planned.roles.notes, *_fallbacks(graph, plan.mesh)),
            missing=asked.missing,
        )

    @property
    def batch(self) -> frozenset[str]:
        """The arguments that hold examples."""
        inputs = self.planned.plan.inputs
        return frozenset(each.path for each in inputs if each.role == "batch")

    def memory(self) -> MemoryShares:
        """As of `PlanOrigin`."""
        graph, plan = self.planned.graph, self.planned.plan
        batch = batch_tensors(self.planned.traced, graph, self.options)
        flow, profile = flow_of_step(graph, batch), memory_profile(graph, plan)
        return memory_shares(profile, flow, plan.predicted.peak_bytes)


@dataclass(frozen=True, eq=False)
class PipelineOrigin:
    """The step of a plan of a pipeline."""

    planned: PlannedPipeline
    leaves: tuple[Any, ...]
    options: Options
    source: PipelineSource

    def findings(self, *, alternatives: bool, audit: bool) -> Findings:
        """What there is to find; see `Findings`."""
        planned = self.planned
        asked = _Asked(alternatives, audit)
        simulation = simulation_of(planned)
        graphs = (each.graph for each in planned.programs)
        cautions = (each for graph in graphs for each in _fallbacks(graph, None))
        return Findings(
            method=self._method(),
            cluster=planned.cluster,
            kinds=self._kinds(),
            curves=tuple(self._curves()),
            tasks=simulation.timeline.events,
            in_flight=simulation.peak_microbatches,
            alternatives=asked.others(self._one_program),
            pins=asked.pins(len(self.options.pins), self._pin_costs),
            audits=asked.audits(self._lowered),
            cautions=tuple(dict.fromkeys(cautions)),
            missing=asked.missing,
        )

    @property
    def batch(self) -> frozenset[str]:
        """The slots of examples."""
        kinds = self._kinds()
        return frozenset(name for name, kind in kinds.items() if kind == "batch")

    def memory(self) -> MemoryShares:
        """As of `PlanOrigin`, by slot in place of lines."""
        curve = max(self._curves(), key=lambda each: max(each.bytes))
        words = {**_SLOTS, **self._kinds()}
        slots, kinds = self.planned.flow.slots, Counter[str]()
        for user in curve.users:
            kind = words.get(user.name)
            if kind is None and user.name in slots:
                kind = words[slots[user.name].kind]
            kinds[kind or "temporaries"] += user.bytes
        lines = tuple((user.name, user.bytes) for user in curve.users)
        kinds["smaller values"] = rest = max(curve.bytes) - kinds.total()
        return MemoryShares(tuple((+kinds).items()), (*lines, ("smaller values", rest)))

    def _pin_costs(self) -> PinCosts:
        return self.source.pin_costs(staged_plan(self.planned))

    def _method(self) -> str:
        """What was asked for, and the pipeline that it led to."""
        asked, found = self.options, replace(self.options, method=self.planned.method)
        if asked.method == found.method:
            return _method_text(asked)
        return f"{_method_text(asked)}: {_method_text(found)}"

    def _lowered(self) -> LoweredPipeline:
        step = pipelined_step(self.planned)
        return LoweredPipeline(step, Plan(staged_plan(self.planned)))

    def _one_program(self) -> Sequence[Alternative]:
        """Plans of the same step without stages, on all devices, of the whole batch."""
        traced, cluster = self.planned.traced, self.planned.cluster
        roles = roles_of(traced)
        graph = build_graph(traced, roles)
        method = ShardParallel()
        alone = {"mesh": None, "plan": None, "pins": {}, "num_microbatches": 1}
        options = replace(self.options, method=method, **alone)
        batch = batch_tensors(traced, graph, options)
        try:
            plan = plan_graph(PlanRequest(graph, self.leaves, batch, cluster, options))
        except (ValueError, NotImplementedError) as error:
            return [Alternative.refused(str(method), error)]
        planned = Planned(traced, graph, roles, plan, cluster, (), options)
        rows = list(compare(planned, self.leaves, options))
        return [replace(rows[0], title="ShardParallel(), no stages"), *rows[1:]]

    def _curves(self) -> Iterator[MemoryCurve]:
        planned = self.planned
        types = {name: str(kind) for name, kind in planned.types.items()}
        for submesh, tasks in enumerate(held_by_submesh(planned)):
            stages = [stage for name, stage in planned.specs]
            here = {s for s in stages if planned.submesh(s) == submesh}
            sizes: dict[str, int] = {}
            for name, stage in planned.specs:
                if stage in here:
                    sizes[name] = planned.slot_bytes(name, stage)
            yield curve_of_submesh(
                f"one device of submesh {submesh}",
                planned.working_bytes(submesh),
                [(str(each.task), each.counts, each.bytes) for each in tasks],
                sizes,
                types,
            )

    def _kinds(self) -> Mapping[str, str]:
        flow = self.planned.flow
        on_examples = {
            name
            for program in flow.programs
            if program.kind != "apply"
            for name in program.inputs
        }
        words = {True: "parameters", False: "optimizer state"}
        return {
            name: "batch" if slot.kind == "batch" else words[name in on_examples]
            for name, slot in flow.slots.items()
            if slot.kind in ("state", "batch")
        }


@dataclass(frozen=True)
class _Asked:
    """Finds what takes long, if it is asked for; `missing` says why it is not there."""

    alternatives: bool
    audit: bool
    missing: dict[Section, str] = field(default_factory=dict[Section, str])

    def others(
        self, plan: Callable[[], Sequence[Alternative]]
    ) -> tuple[Alternative, ...]:
        """Other plans of the step."""
        if not self.alternatives:
            self.missing["alternatives"] = _NOT_ASKED.format(flag="alternatives")
            return ()
        return tuple(_quiet(plan))

    def pins(self, number: int, price: Callable[[], PinCosts]) -> tuple[PinCost, ...]:
        """What each pin costs."""
        reason = "" if self.alternatives else _NOT_ASKED.format(flag="alternatives")
        if not number:
            reason = "nothing was pinned."
        elif number > _MANY_PINS:
            reason = f"{number} take long; ask for them with plan.pin_costs()."
        try:
            if not reason:
                return _quiet(lambda: price().costs)
        except (ValueError, NotImplementedError) as error:
            reason = str(error)
        self.missing["pins"] = reason
        return ()

    def audits(
        self, lower: Callable[[], Lowered | LoweredPipeline]
    ) -> tuple[tuple[str, Audit], ...]:
        """Compiled for the devices of this process, if there are enough of them."""
        if not self.audit:
            self.missing["audit"] = _NOT_ASKED.format(flag="audit")
            return ()
        try:
            figures = compiled_figures(lower())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            self.missing["audit"] = f"the program cannot be compiled here: {error}"
            return ()
        assert isinstance(figures, CompiledFigures), figures
        return figures.named().audits


def with_origin(
    planned: Planned | PlannedPipeline,
    fun: Callable[..., Any],
    call: Call,
    options: Options,
) -> Plan:
    """The plan of a call of `fun`, which knows what it is of; keeps no array alive."""
    leaves, types = call.leaves, _types(call.leaves)
    why = why_modelled(planned.cluster, options.mesh)
    if isinstance(planned, PlannedPipeline):
        args, kwargs = jax.tree.unflatten(planned.traced.in_tree, types)
        plain = plain_function(fun, call.statics)
        price = partial(_priced, options)
        source = PipelineSource(plain, args, kwargs, options, price)
        origin = PipelineOrigin(planned, types, options, source)
        name, one = "ShardParallel()", planned.one_program
        tried = () if one is None else (TriedPlan(name, one),)
        return Plan(price(planned), origin, source, compiled=why, tried=tried)
    origin = StepOrigin(planned, types, options)
    step = traced_step(planned, leaves, options)
    tried = planned.plan.tried
    return Plan(planned.plan, origin, step, compiled=why, tried=tried)


def _priced(options: Options, planned: PlannedPipeline) -> StagedPlan:
    """The plan of a pipeline, which says within what budget it was made."""
    budget_bytes = options.budget_on(planned.cluster)
    if options.plan is not None:
        budget_bytes = options.plan.predicted.budget_bytes
    return with_budget(staged_plan(planned), budget_bytes)


def _types(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array)
        else leaf
        for leaf in leaves
    )


def _quiet(call: Callable[[], Any]) -> Any:
    """The result of planning, whose warnings were given before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _method_text(options: Options) -> str:
    words = [re.sub(r", \w+=None", "", str(options.method))]
    if options.plan is not None:
        words.append("with a plan that was given")
    if options.rules is not None:
        words.append(f"with {options.rules}")
    if options.pins:
        words.append(f"with {len(options.pins)} pins")
    return ", ".join(words)


def _kinds(graph: OpGraph, batch: Sequence[int]) -> Mapping[str, str]:
    """Parameters are state that work on examples reads; the rest is the optimizer's."""
    flow = flow_of_step(graph, batch)
    words = {True: "parameters", False: "optimizer state"}
    return {
        each.path: words[each.tensor in flow.parameters]
        for each in graph.inputs
        if each.role == "state" and flow.parameters
    }


def _fallbacks(graph: OpGraph, mesh: MeshShape | None) -> tuple[str, ...]:
    """What was warned of while the graph was planned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_fallbacks(graph)
        if mesh is not None:
            warn_ignored_constraints(graph, mesh)
    return tuple(dict.fromkeys(str(each.message) for each in caught))
