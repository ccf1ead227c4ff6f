"""The steps that plans are of, and what is found out from them for a report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from ..audit.audit import Audit
from ..commands.method_comparison import Row, compare
from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..execution import held_by_submesh, pipelined_step, staged_plan
from ..frontend.calls import Call, plain_function
from ..graph.build_graph import PINS, build_graph
from ..graph.constraints import warn_ignored_constraints
from ..graph.op_graph import OpGraph
from ..lowering.lowered_pipeline import LoweredPipeline
from ..lowering.lowered_step import Lowered
from ..lowering.programs import SpmdProgram
from ..methods.batch_dims import BatchDims
from ..methods.methods import ShardParallel
from ..options import Options
from ..pipelines.pipeline_plan import PlannedPipeline
from ..pipelines.pipeline_source import PipelineSource
from ..planner.intra_op import warn_fallbacks
from ..planner.memory_budget import with_budget
from ..planner.pin_costs import pin_costs
from ..planner.planning import Planned, batch_tensors, plan_graph, roles_of
from ..planner.traced_step import traced_step
from ..plans.explain import format_bytes
from ..plans.parallel_plan import Plan
from ..plans.pin_cost import PinCosts
from ..sharding.mesh import MeshShape
from ..targets.target import why_modelled
from .findings import Alternative, Findings, MemoryCurve, PinPrice, Section
from .memory_curves import curve_of_program, curve_of_submesh
from .report import alternative

_NOT_ASKED = "it was not asked for; write the report again without {flag}=False."
_MANY_PINS = 12  # each is solved for anew


@dataclass(frozen=True, eq=False)
class StepOrigin:
    """The step of a plan of one program; `leaves` are types with their shardings."""

    planned: Planned
    leaves: tuple[Any, ...]
    options: Options
    program_of: Callable[[Planned], SpmdProgram]

    def findings(self, *, alternatives: bool, audit: bool) -> Findings:
        """What there is to find; see `Findings`."""
        planned, options = self.planned, self.options
        graph, plan = planned.graph, planned.plan.sharding
        missing: dict[Section, str] = {}
        others: tuple[Alternative, ...] = ()
        pins: tuple[PinPrice, ...] = ()
        if alternatives:
            rows = _quiet(lambda: list(compare(planned, self.leaves, options)))
            others = tuple(map(_alternative, rows[1:]))
            operators = graph.operators()
            lines = {op.source for op in operators if op.kind in PINS}
            given = planned, self.leaves, options
            number = len(options.pins) + len(lines)
            pins = _pins(number, lambda: pin_costs(*given), missing)
        else:
            missing["alternatives"] = _NOT_ASKED.format(flag="alternatives")
            missing["pins"] = _NOT_ASKED.format(flag="alternatives")
        audits = _audits(self._lowered, audit, missing)
        correction = plan.predicted.memory_correction
        curve = curve_of_program(memory_profile(graph, plan), correction)
        return Findings(
            _method_text(options),
            planned.cluster,
            _kinds(graph, batch_tensors(planned.traced, graph, options)),
            (curve,),
            others,
            pins,
            audits,
            (*planned.roles.notes, *_fallbacks(graph, plan.mesh)),
            missing,
        )

    def _lowered(self) -> Lowered:
        planned = self.planned
        program = self.program_of(planned)
        return Lowered(program, planned.plan, planned.traced, planned.graph)


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
        missing: dict[Section, str] = {}
        others: tuple[Alternative, ...] = ()
        pins: tuple[PinPrice, ...] = ()
        if alternatives:
            others = _quiet(self._one_program)
            plan = staged_plan(planned).stages
            number = len(self.options.pins)
            pins = _pins(number, lambda: self.source.pin_costs(plan), missing)
        else:
            missing["alternatives"] = _NOT_ASKED.format(flag="alternatives")
            missing["pins"] = _NOT_ASKED.format(flag="alternatives")
        graphs = {str(c): c for p in planned.pieces for c in _fallbacks(p.graph, None)}
        return Findings(
            self._method(),
            planned.cluster,
            self._kinds(),
            tuple(self._curves()),
            others,
            pins,
            _audits(self._lowered, audit, missing),
            tuple(graphs),
            missing,
        )

    def _method(self) -> str:
        """What was asked for, and the pipeline that it led to."""
        asked, found = self.options, replace(self.options, method=self.planned.method)
        if asked.method == found.method:
            return _method_text(asked)
        return f"{_method_text(asked)}: {_method_text(found)}"

    def _lowered(self) -> LoweredPipeline:
        step = pipelined_step(self.planned)
        return LoweredPipeline(step, staged_plan(self.planned))

    def _one_program(self) -> tuple[Alternative, ...]:
        """Plans of the same step without stages, on all devices, of the whole batch."""
        traced, cluster = self.planned.traced, self.planned.cluster
        roles = roles_of(traced)
        graph = build_graph(traced, roles)
        method = ShardParallel()
        options = replace(
            self.options,
            method=method,
            mesh=None,
            plan=None,
            pins={},
            num_microbatches=1,
        )
        batch = batch_tensors(traced, graph, options)
        try:
            plan = plan_graph(graph, self.leaves, batch, cluster, options)
        except (ValueError, NotImplementedError) as error:
            return (_alternative(Row(str(method), error)),)
        planned = Planned(traced, graph, roles, plan, cluster, ())
        rows = list(compare(planned, self.leaves, options))
        named = [replace(rows[0], name="ShardParallel(), no stages"), *rows[1:]]
        return tuple(map(_alternative, named))

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
        kinds = {
            name: "batch" if slot.kind == "batch" else words[name in on_examples]
            for name, slot in flow.slots.items()
            if slot.kind in ("state", "batch")
        }
        return kinds


def _pins(
    number: int, price: Callable[[], PinCosts], missing: dict[Section, str]
) -> tuple[PinPrice, ...]:
    if not number:
        missing["pins"] = "nothing was pinned."
    elif number > _MANY_PINS:
        missing["pins"] = (
            f"there are {number}, and each takes solving anew; ask for them with "
            f"plan.pin_costs()."
        )
    if "pins" in missing:
        return ()
    try:
        found = _quiet(lambda: price().costs)
    except (ValueError, NotImplementedError) as error:
        missing["pins"] = str(error)
        return ()
    return tuple(PinPrice(c.pin, c.step_seconds, c.seconds_without) for c in found)


def with_origin(
    planned: Planned | PlannedPipeline,
    fun: Callable[..., Any],
    call: Call,
    options: Options,
    program_of: Callable[[Planned], SpmdProgram],
) -> Plan:
    """The plan of a call of `fun`, which knows what it is of; keeps no array alive.

    `program_of` lowers a step that is no pipeline.
    """
    leaves, types = call.leaves, _types(call.leaves)
    why = why_modelled(planned.cluster, options.mesh)
    if isinstance(planned, PlannedPipeline):
        args, kwargs = jax.tree.unflatten(planned.traced.in_tree, types)
        plain = plain_function(fun, call.statics)
        price = partial(_priced, options)
        source = PipelineSource(plain, args, kwargs, options, price)
        origin = PipelineOrigin(planned, types, options, source)
        found = price(planned)
        return replace(found, origin=origin, stage_source=source, compiled=why)
    origin = StepOrigin(planned, types, options, program_of)
    found = traced_step(planned, leaves, options)
    return replace(found, origin=origin, compiled=why)


def _priced(options: Options, planned: PlannedPipeline) -> Plan:
    """The plan of a pipeline, which says within what budget it was made."""
    budget_bytes = options.budget_on(planned.cluster)
    if options.plan is not None:
        budget_bytes = options.plan.predicted.budget_bytes
    return Plan(with_budget(staged_plan(planned).stages, budget_bytes))


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


def _alternative(row: Row) -> Alternative:
    if isinstance(row.plan, InfeasiblePlanError) and row.plan.least_budget_bytes:
        least = format_bytes(row.plan.least_budget_bytes)
        return Alternative(row.name, refusal=f"does not fit: needs {least} a device")
    if isinstance(row.plan, Exception):
        return Alternative(row.name, refusal=str(row.plan))
    return alternative(row.name, row.plan)


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
    one = MeshShape(("x",), (1,))
    flow = BatchDims.of("a report", graph, one, batch, ()).flow()
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


def _audits(
    lower: Callable[[], Lowered | LoweredPipeline],
    is_wanted: bool,
    missing: dict[Section, str],
) -> tuple[tuple[str, Audit], ...]:
    """Compiled for the devices of this process, if there are enough of them."""
    if not is_wanted:
        missing["audit"] = _NOT_ASKED.format(flag="audit")
        return ()
    try:
        found = lower().compile().audit()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        missing["audit"] = f"the program cannot be compiled here: {error}"
        return ()
    where = f"compiled for devices of this process ({jax.devices()[0].device_kind})"
    if isinstance(found, Audit):
        return ((where, found),)
    return tuple((f"{name}, {where}", each) for name, each in found.audits)
