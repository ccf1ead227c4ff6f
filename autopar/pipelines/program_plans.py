"""Plan every program of a pipelined step, each for its stage's submesh.

Forward, planned alone, would split the batch and keep every parameter whole, as it
never sees a gradient. So forward and backward of a stage are first planned as one
program: it says where parameters, gradients and what comes in lie, and in what spec
backward reads what forward makes. Each program is then planned for itself within that.
Programs that differ in names alone are planned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ..clusters.cluster import Cluster
from ..costs.resharding import Resharder
from ..errors import PlanFileError
from ..graph.op_graph import Operand, OpGraph, TensorType, constant_key, params_key
from ..lowering.partial_sums import held_shape
from ..lowering.programs import SpmdProgram, StageProgram, build_program
from ..methods.restrictions import Restriction
from ..planner.intra_op import plan_intra_op
from ..planner.restrict import Limit
from ..plans.plan import ShardingPlan
from ..plans.plan_check import check_against
from ..plans.staged_plan import StageProgramPlan
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.spec import REPLICATED, Spec, axes_of_dim, pending_axes
from .cut_programs import CutProgram, CutPrograms, check_operands, joint_program
from .stage_demands import StageDemands
from .step_parts import COUNTER

Run = Callable[[Sequence[Any]], Sequence[Any]]
SlotSpecs = dict[tuple[str, int], Spec]  # by slot and stage
# What is forbidden in a program, by its number; None for those of a stage as one.
Limits = Callable[[int | None, OpGraph], Sequence[Limit]]


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A stage program with its plan: lists of slots in, lists of slots out.

    `graph` computes it, `donated` are positions of inputs whose buffers it reuses,
    `host_outputs` of outputs that go to the host's memory.
    """

    cut: CutProgram
    graph: OpGraph
    plan: ShardingPlan
    donated: tuple[int, ...]
    host_outputs: tuple[int, ...] = ()
    _lowered: dict[Any, SpmdProgram] = field(init=False, default_factory=dict)

    @property
    def stage(self) -> int:
        return self.cut.stage

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The slots that it takes."""
        return tuple(each.path for each in self.graph.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The slots that it returns."""
        return self.graph.output_paths

    @property
    def host_slots(self) -> list[str]:
        """What the stage keeps in the host's memory while it runs other programs."""
        made = [self.outputs[i] for i in self.host_outputs]
        return made + [i.path for i in self.plan.inputs if i.memory == "host"]

    @property
    def slot_types(self) -> dict[str, TensorType]:
        """The type of each slot that it takes or returns."""
        operands = (*(each.tensor for each in self.graph.inputs), *self.graph.outputs)
        types = map(self.graph.type_of, operands)
        return dict(zip((*self.inputs, *self.outputs), types, strict=True))

    def running(self, run: Run) -> StageProgram:
        """The program in the dataflow of the step, where `run` executes it."""
        place = self.stage, self.cut.kind
        return StageProgram(*place, self.inputs, self.outputs, run, self.donated)

    def program(self, cluster: Cluster, mesh: Mesh | AbstractMesh) -> SpmdProgram:
        """The program on the devices of its stage, made once."""
        if mesh not in self._lowered:
            self._lowered[mesh] = self._program(cluster, mesh)
        return self._lowered[mesh]

    def _program(self, cluster: Cluster, mesh: Mesh | AbstractMesh) -> SpmdProgram:
        sizes = self.plan.mesh.axis_sizes
        structs = [
            jax.ShapeDtypeStruct(held_shape(kind.shape, each.spec, sizes), kind.dtype)
            for own, each in zip(self.graph.inputs, self.plan.inputs, strict=True)
            for kind in (self.graph.type_of(own.tensor),)
        ]
        return build_program(
            *(self.graph, self.plan, Resharder(self.plan.mesh, cluster), mesh),
            *(structs, (), self.donated),
            host_outputs=self.host_outputs,
        )


@dataclass(eq=False)
class Settled:
    """What programs that are planned leave to those that follow.

    `specs` are those of slots on stages, `wanted` those in which stages are to return
    values; `types` are by slot, `host` are slots in the host's memory.
    """

    specs: SlotSpecs = field(default_factory=SlotSpecs)
    wanted: SlotSpecs = field(default_factory=SlotSpecs)
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    host: set[str] = field(default_factory=set[str])

    def note(self, planned: PlannedProgram) -> None:
        """A program is planned: its specs stay."""
        plan, stage = planned.plan, planned.stage
        for each in plan.inputs:
            self.specs.setdefault((each.path, stage), each.spec)
        for path, spec in zip(planned.outputs, plan.outputs[0], strict=True):
            self.specs.setdefault((path, stage), spec)
        self.types = planned.slot_types | self.types
        self.host.update(planned.host_slots)

    def note_joint(self, joint: CutProgram, part: OpGraph, plan: ShardingPlan) -> None:
        """All work of a stage on a microbatch is planned: its programs keep to that."""
        for each in plan.inputs:
            self.specs.setdefault((each.path, joint.stage), each.spec)
        read = _specs_read(plan, part)
        outputs = zip(part.output_paths, part.outputs, plan.outputs[0], strict=True)
        for slot, operand, spec in outputs:
            if isinstance(operand, int) and slot not in joint.added:
                self.wanted[slot, joint.stage] = read.get(operand, spec)


@dataclass(frozen=True, eq=False)
class PlannedPrograms:
    """The programs of a step with their plans, in order.

    `specs` are those of each slot on each stage that holds it, `types` by slot.
    `least_seconds` is what no plan of a stage takes less for a microbatch, forward and
    backward, by stage; of plans that were given it is not known.
    """

    programs: tuple[PlannedProgram, ...]
    specs: Mapping[tuple[str, int], Spec]
    types: Mapping[str, TensorType]
    least_seconds: Mapping[int, float]


def plan_programs(
    cut: CutPrograms,
    demands: StageDemands,
    planner: ProgramPlanner,
    given: Sequence[StageProgramPlan] | None = None,
    known: Mapping[int, PlannedProgram] | None = None,
    limits: Limits = lambda number, graph: (),
) -> PlannedPrograms:
    """Plan all programs; those of one stage agree on the specs they share.

    Arguments:
      given: plans of all programs, to use as they are.
      known: programs that are planned already, by number.
      limits: what more is forbidden.

    Raises:
      PlanFileError: the given plans are of another step.
      ValueError: a pin of a leaf is of other stages than the leaf's own.
      NotImplementedError: a program lacks an operand.
    """
    check_operands(cut.programs, cut.slots, (*cut.parts.batch, COUNTER))
    homes = cut.stages_of_leaves()
    demands.pins.check_stages(homes, demands.shapes, demands.devices)
    known, settled = known or {}, Settled()
    settled.host.update(demands.host)
    least: dict[int, float] = {}
    if given is not None:
        _check_given(cut, given)
    else:
        new = [p for i, p in enumerate(cut.programs) if i not in known]
        for stage in range(len(demands.shapes)):
            own = (each for each in new if each.stage == stage)
            joint = joint_program(own, cut.parts.microbatch)
            if joint is not None:
                part = cut.graph_of(joint, settled.host)
                asked = joint, part, cut, demands, settled, planner.joint_gap
                plan = planner.solve(*asked, limits(None, part))
                settled.note_joint(joint, part, plan)
                least[stage] = _least_seconds(plan)
    planned: list[PlannedProgram] = []
    for number, program in enumerate(cut.programs):
        found = known.get(number)
        if found is None:
            part = cut.graph_of(program, settled.host)
            if given is not None:
                plan = given[number].sharding
                check_against(plan, part)
            else:
                asked = program, part, cut, demands, settled, PROGRAM_GAP
                plan = planner.solve(*asked, limits(number, part))
                if program.kind == "backward":
                    plan = replace(plan, remat=demands.remat)
                if program.kind != "apply":
                    least.setdefault(program.stage, _least_seconds(plan))
            found = _planned(program, part, plan, cut, demands, settled)
        settled.note(found)
        planned.append(found)
    return PlannedPrograms(tuple(planned), settled.specs, settled.types, least)


def _least_seconds(plan: ShardingPlan) -> float:
    """What no other plan of the same problem takes less."""
    predicted = plan.predicted
    return max(predicted.step_seconds * (1 - predicted.optimality_gap), 0.0)


def _check_given(cut: CutPrograms, given: Sequence[StageProgramPlan]) -> None:
    planned = [f"stage {each.stage}, {each.kind}" for each in given]
    wanted = list(map(str, cut.programs))
    if planned != wanted:
        raise PlanFileError(
            f"a plan of a pipeline must fit the step it runs, but has the programs "
            f"{planned} and the step has {wanted}; plan again with step.plan(...)."
        )


def _planned(
    program: CutProgram,
    part: OpGraph,
    plan: ShardingPlan,
    cut: CutPrograms,
    demands: StageDemands,
    settled: Settled,
) -> PlannedProgram:
    at_host = _outputs_at_host(part)
    return PlannedProgram(
        program,
        part,
        plan,
        tuple(
            i
            for i, each in enumerate(part.inputs)
            if each.output is not None and each.path not in demands.kept
        ),
        tuple(
            i
            for i, name in enumerate(part.output_paths)
            if i in at_host
            or (name in settled.host and cut.slots[name].kind == "state")
        ),
    )


def _outputs_at_host(graph: OpGraph) -> frozenset[int]:
    """Positions of outputs that operators leave in the host's memory.

    A policy of `jax.checkpoint` that offloads what it saves makes such residuals.
    """
    host = {
        tensor
        for op in graph.blocks[0].operators
        for tensor, var in zip(op.results, op.eqn.outvars, strict=True)
        if getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
    }
    return frozenset(i for i, each in enumerate(graph.outputs) if each in host)


PROGRAM_GAP = 1e-4  # of what is run


@dataclass
class ProgramPlanner:
    """Plans programs on submeshes; equal ones once, unless something is forbidden.

    `joint_gap` is enough for forward and backward as one, whose plan is not run.
    """

    joint_gap: float = PROGRAM_GAP
    known: dict[Hashable, ShardingPlan] = field(default_factory=dict)

    def solve(
        self,
        program: CutProgram,
        part: OpGraph,
        cut: CutPrograms,
        demands: StageDemands,
        settled: Settled,
        gap: float,
        limits: Sequence[Limit] = (),
    ) -> ShardingPlan:
        """The cheapest plan of a program that keeps to the specs that are settled."""
        stage = program.stage
        mesh, cluster = demands.shapes[stage], demands.clusters[stage]
        kept = {
            i.tensor: _pin_of(settled.specs[i.path, stage], part, i.tensor)
            for i in part.inputs
            if (i.path, stage) in settled.specs
        }
        pins = {**demands.pins.of_program(part, mesh), **kept}
        returned = {
            operand: settled.wanted[path, stage]
            for path, operand in zip(part.output_paths, part.outputs, strict=True)
            if isinstance(operand, int) and (path, stage) in settled.wanted
        }
        split = [
            i.tensor
            for i in part.inputs
            if stage in demands.split
            and cut.slots[i.path].kind in ("state", "gradient")
        ]
        restrictions = (
            *_restrictions(part, mesh, pins, returned, split),
            *demands.restrictions(part, mesh, kept),
        )
        key = (
            *(fingerprint(part), mesh, cluster, gap, repr(restrictions)),
            tuple(sorted(pins.items(), key=itemgetter(0))),
        )
        if not limits and key in self.known:
            return renamed(self.known[key], part)
        every = (*restrictions, *limits)
        found = plan_intra_op(
            part, mesh, cluster, pins=pins, restrictions=every, gap=gap
        )
        if not limits:
            self.known[key] = found.plan
        return found.plan


def _restrictions(
    graph: OpGraph,
    mesh: MeshShape,
    pins: Mapping[int, Pin],
    returned: Mapping[int, Spec],
    split: Collection[int],
) -> Sequence[Restriction]:
    """What a stage's programs leave to the solver.

    `returned` are the specs in which results are to be returned, by tensor; `split` are
    arguments that are to lie in as many parts as there are devices.
    """
    wanted = {t: tuple(frozenset((s,)) for s in spec) for t, spec in returned.items()}
    homes = {
        t: (frozenset(range(graph.tensors[t].type.rank)),) * mesh.num_axes
        for t in split
        if t not in pins and graph.tensors[t].type.rank
    }
    if not wanted and not homes:
        return ()
    return (Restriction("the stage", {}, {}, homes, returned=wanted),)


def _specs_read(plan: ShardingPlan, graph: OpGraph) -> dict[int, Spec]:
    """In which spec what forward makes is mostly read by backward, by tensor.

    `plan` is that of both as one program; no spec is pending.
    """
    reads: dict[int, Counter[Spec]] = {}
    phase_of = {
        t: "transpose(" in op.name for op in graph.operators() for t in op.results
    }
    for op, planned in zip(graph.operators(), plan.operators, strict=True):
        if "transpose(" not in op.name:
            continue
        for operand, spec in zip(op.operands, planned.operand_specs, strict=True):
            if not isinstance(operand, int) or phase_of.get(operand, True):
                continue
            if min(spec, default=0) >= REPLICATED:
                reads.setdefault(operand, Counter())[spec] += 1
    return {t: found.most_common(1)[0][0] for t, found in reads.items()}


def _pin_of(spec: Spec, graph: OpGraph, tensor: int) -> Pin:
    """The pin that allows an argument one spec."""
    rank = graph.tensors[tensor].type.rank
    dims = tuple(axes_of_dim(spec, dim) for dim in range(rank))
    return Pin(dims, pending_axes(spec))


def fingerprint(graph: OpGraph) -> Hashable:
    """Equal for graphs that are equal but for names."""
    return (
        tuple((t.type, t.block) for t in graph.tensors),
        tuple(replace(i, path="") for i in graph.inputs),
        tuple(
            (
                (block.parent, block.trip_count, block.weight, block.conditional),
                block.unbounded,
                block.inputs,
                _operands_key(block.outputs),
                tuple(
                    (
                        *(op.kind, params_key(op.params), op.results, op.bodies),
                        _operands_key(op.operands),
                    )
                    for op in block.operators
                ),
            )
            for block in graph.blocks
        ),
    )


def renamed(plan: ShardingPlan, graph: OpGraph) -> ShardingPlan:
    """The plan of an equal graph, with the names of this one."""
    operators = graph.operators()
    sources: dict[str, str] = {}
    made_by = {t: op.source for op in operators for t in op.results}
    old_by = {
        t: each.source
        for op, each in zip(operators, plan.operators, strict=True)
        for t in op.results
    }
    for index, (tensor, old) in enumerate(
        zip(graph.tensors, plan.tensors, strict=True)
    ):
        before = f"{old.name} {old_by.get(index, '')}".strip()
        sources[before] = f"{tensor.name} {made_by.get(index, '')}".strip()
    return replace(
        plan,
        function=graph.name,
        inputs=tuple(
            replace(each, path=own.path)
            for each, own in zip(plan.inputs, graph.inputs, strict=True)
        ),
        operators=tuple(
            replace(each, name=op.name, source=op.source)
            for each, op in zip(plan.operators, operators, strict=True)
        ),
        tensors=tuple(
            replace(each, name=own.name)
            for each, own in zip(plan.tensors, graph.tensors, strict=True)
        ),
        collectives=tuple(
            replace(each, source=sources.get(each.source, each.source))
            for each in plan.collectives
        ),
    )


def _operands_key(operands: Sequence[Operand]) -> Hashable:
    """The numbers of tensors, and equal values for equal literals."""
    return tuple(o if isinstance(o, int) else constant_key(o) for o in operands)
