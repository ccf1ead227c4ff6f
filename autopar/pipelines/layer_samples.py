"""Layers cut out of a step as stages of their own, on a microbatch of any size.

The step is cut once, at the borders of one layer of each kind, as it lies in its own
graph; for a number of microbatches, the operators of these layers alone are traced
again. Where a microbatch is a batch of its own ("independent"), it is another trace,
and the step is cut for each number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds, total_flops
from ..costs.resharding import Resharder
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Constant, Operand, Operator, OpGraph, TensorType
from ..lowering.programs import Slot
from ..microbatches.microbatch_flow import Flow
from ..microbatches.microbatch_runners import MicrobatchRunner
from ..options import Options
from ..planner.strategies import SLICING, tensor_specs
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec, is_pending, num_shards
from .cut_programs import (
    CutProgram,
    CutPrograms,
    joint_program,
    run_program,
)
from .cut_step import CutStep
from .program_plans import ProgramPlanner, Settled
from .stage_demands import StageDemands, stage_demands
from .step_parts import COUNTER, graph_of


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes on one device of a submesh.

    `seconds` are of a microbatch, forward and backward, `once_seconds` of the update;
    of these, `reducing_seconds` are what it takes to add up the parts of sums.
    `state_bytes` are parameters and what the optimizer keeps, `gradient_bytes` their
    sums, `microbatch_bytes` what backward waits for; `working_bytes` come and go.
    """

    seconds: float = 0.0
    once_seconds: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    microbatch_bytes: float = 0.0
    working_bytes: float = 0.0
    reducing_seconds: float = 0.0


# Of an operator: kind, flops, bytes, dtype, and how often it runs.
Work = tuple[str, float, float, Any, float]


def work_of(operators: Iterable[tuple[Operator, float]]) -> list[Work]:
    """The work of operators without bodies, with how often what is alike runs."""
    found = defaultdict[tuple[str, float, float, Any], float](float)
    for op, times in operators:
        read = op.operand_types[op.kind in SLICING :]
        num_bytes = float(sum(kind.bytes for kind in (*read, *op.result_types)))
        dtypes = [kind.dtype for kind in op.operand_types if not kind.is_extended]
        dtype = dtypes[0] if dtypes else "float32"
        found[op.kind, total_flops(op), num_bytes, dtype] += times
    return [(*each, times) for each, times in found.items()]


def seconds_of(work: Sequence[Work], share: float, cluster: Cluster) -> float:
    """If a device does a share of each operator, and nothing is sent."""
    return sum(
        times * operator_seconds(kind, flops * share, num_bytes * share, dtype, cluster)
        for kind, flops, num_bytes, dtype, times in work
    )


def reduced_sums(
    plan: ShardingPlan, graph: OpGraph, resharder: Resharder
) -> tuple[float, dict[str, float]]:
    """Seconds in which the update adds up the parts of sums; then a device's bytes.

    The bytes are of every input, by slot.
    """
    seconds, held = 0.0, {each.path: float(each.bytes) for each in plan.inputs}
    for each, own in zip(plan.inputs, graph.inputs, strict=True):
        if is_pending(each.spec):
            kind = graph.tensors[own.tensor].type
            least, number = _reduced(kind, each.spec, resharder)
            seconds, held[each.path] = seconds + least, kind.bytes / number
    return seconds, held


def _reduced(kind: TensorType, spec: Spec, resharder: Resharder) -> tuple[float, int]:
    """The least seconds for what a spec owes, and how many devices share the sum."""
    costs: list[tuple[float, int]] = []
    for target in tensor_specs(kind, resharder.mesh, pending=False):
        seconds = resharder.seconds(spec, target, kind.bytes)
        number = num_shards(target, resharder.mesh.axis_sizes)
        costs.append((seconds, number))
    return min(costs)


def trace_layer(
    cut: CutPrograms,
    program: CutProgram,
    split: Flow,
    number: int,
    host: Collection[str],
) -> OpGraph:
    """The graph of a microbatch of a program, whose own graph is of the whole batch."""
    names, whole = (*program.taken, COUNTER), cut.parts.microbatch

    def task(*values: Any) -> list[Any]:
        given = dict(zip(names, values, strict=True))
        runner = MicrobatchRunner(split, number, {}, given[COUNTER])

        def value_of(name: str, operand: Operand) -> Any:
            if isinstance(operand, Constant):
                return operand.value
            reduction = cut.parts.sums.get(name)
            if reduction is None:
                return runner.values[operand]
            return runner.read(operand, (reduction, 1))

        return run_program(program, runner, given, value_of)

    def struct_of(operand: Operand) -> jax.ShapeDtypeStruct:
        """Of what is cut, the part of one microbatch."""
        kind = whole.type_of(operand)
        shape = list(kind.shape)
        state = split.state_of(operand)
        if state >= 0:
            shape[state] //= number
        return jax.ShapeDtypeStruct(tuple(shape), kind.dtype)

    task.__name__ = f"{program.kind}_{program.stage}"
    structs = [*map(struct_of, program.taken.values())]
    structs.append(jax.ShapeDtypeStruct((), jnp.uint32))
    ties = (*program.ties(cut.slots), None)
    part = graph_of(task, structs, names, list(program.outputs), ties)
    return cut.with_roles(part, host, number)


PLAN_GAP = 0.02


@dataclass(frozen=True)
class Submesh:
    """A logical mesh of a stage, and whether its state lies in as many parts.

    `part` is the part of a cluster of several kinds that it is on.
    """

    mesh: MeshShape
    is_split: bool
    part: int = 0

    def __str__(self) -> str:
        where = f" on part {self.part}" if self.part else ""
        return f"{self.mesh}{', state split' if self.is_split else ''}{where}"

    def cluster(self, whole: Cluster) -> Cluster:
        """What it is a submesh of, in a whole cluster."""
        return whole.parts[self.part] if whole.parts else whole


@dataclass(frozen=True, eq=False)
class LayerSample:
    """A layer of one kind as a stage: its forward and backward are one program.

    `split` says how a microbatch is cut from the graph; None if the graph is of one.
    """

    cut: CutPrograms
    demands: StageDemands
    planner: ProgramPlanner
    joint: CutProgram
    own: tuple[CutProgram, ...]
    update: tuple[Operator, ...]
    split: Flow | None
    graphs: dict[int, OpGraph] = field(default_factory=dict)
    seconds: dict[Hashable, float] = field(default_factory=dict)

    def cost(self, submesh: Submesh, number: int, cluster: Cluster) -> LayerCost:
        """Of one of `number` microbatches, as the solver plans it there."""
        num_stages = len(self.demands.shapes)
        demands = replace(
            self.demands,
            shapes=[submesh.mesh] * num_stages,
            clusters=[cluster] * num_stages,
            split=frozenset({self.joint.stage} if submesh.is_split else ()),
        )
        graph = self.graph(number)
        asked = self.joint, graph, self.cut, demands, Settled(), PLAN_GAP
        plan = self.planner.solve(*asked)
        return self._cost_of(plan, graph, submesh, cluster)

    def ideal(self, num_devices: int, number: int, cluster: Cluster) -> LayerCost:
        """If every device did an equal part and nothing were sent."""
        share, sizes = 1 / num_devices, self._slot_bytes

        def held_in(names: Iterable[str]) -> float:
            parts = (sizes[name] for name in names if name in sizes)
            return share * sum(each / number if cut else each for each, cut in parts)

        parts = (False, share), (True, share / number)
        return LayerCost(
            sum(self._seconds(*part, cluster) for part in parts),
            seconds_of(self._update, share, cluster),
            share * sum(self._state.values()),
            held_in(self.joint.added),
            held_in(self._kept_names),
        )

    def _seconds(self, is_cut: bool, share: float, cluster: Cluster) -> float:
        """Of work that a microbatch does a part of, or not, if a device does a share;
        known from other numbers of devices and microbatches with the same product."""
        key = is_cut, share, cluster
        if key not in self.seconds:
            self.seconds[key] = seconds_of(self._work[is_cut], share, cluster)
        return self.seconds[key]

    def graph(self, number: int) -> OpGraph:
        """The graph of one of `number` microbatches."""
        if number not in self.graphs:
            if self.split is None:
                found = self.cut.graph_of(self.joint, self.demands.host)
            else:
                asked = self.split, number, self.demands.host
                found = trace_layer(self.cut, self.joint, *asked)
            self.graphs[number] = found
        return self.graphs[number]

    @cached_property
    def _slot_bytes(self) -> dict[str, tuple[float, bool]]:
        """Bytes of what the program reads and returns, by slot, in all; and whether a
        microbatch has a part of it."""
        slots = (*self.joint.inputs.items(), *self.joint.outputs.items())
        return {
            name: self._bytes(operand)
            for name, operand in slots
            if isinstance(operand, int)
        }

    def _bytes(self, tensor: int) -> tuple[float, bool]:
        kind = self.cut.parts.microbatch.tensors[tensor].type
        is_cut = self.split is not None and self.split.state_of(tensor) >= 0
        return float(kind.bytes), is_cut

    @cached_property
    def _work(self) -> tuple[list[Work], list[Work]]:
        """What there is to do whole, and what a microbatch does a part of."""
        of_all: list[tuple[Operator, float]] = []
        of_part: list[tuple[Operator, float]] = []
        for op, times in _flat(self.cut.parts.microbatch, self.joint.operators):
            factor = None if self.split is None else self.split.factor.get(op.index)
            is_cut = factor is not None and factor.splits
            (of_part if is_cut else of_all).append((op, times))
        return work_of(of_all), work_of(of_part)

    @cached_property
    def _update(self) -> list[Work]:
        return work_of((op, 1.0) for op in self.update if not op.bodies)

    @cached_property
    def _all_state(self) -> dict[str, float]:
        """Bytes of all state of the stage, by slot."""
        update = self.cut.parts.apply
        sizes = {i.path: update.tensors[i.tensor].type.bytes for i in update.inputs}
        return {
            name: float(sizes[name])
            for name, slot in self.cut.slots.items()
            if slot.kind == "state" and slot.stage == self.joint.stage and name in sizes
        }

    @cached_property
    def _state(self) -> dict[str, float]:
        """The same of what devices hold between steps."""
        sizes = self._all_state.items()
        return {name: size for name, size in sizes if name not in self.demands.host}

    @cached_property
    def _kept_names(self) -> list[str]:
        """Slots of a microbatch that forward has at hand and backward reads."""
        slots = self.cut.slots
        forward = {
            name
            for each in self.own
            if each.kind == "forward"
            for name in (*each.inputs, *each.outputs)
        }
        read = {
            name for each in self.own if each.kind != "forward" for name in each.inputs
        }
        kinds = ("activation", "batch")
        return [n for n in sorted(forward & read) if slots[n].kind in kinds]

    def _cost_of(
        self, plan: ShardingPlan, graph: OpGraph, submesh: Submesh, cluster: Cluster
    ) -> LayerCost:
        mesh, state = submesh.mesh, self._state
        whole = {i.path: graph.tensors[i.tensor].type.bytes for i in graph.inputs}
        held = {each.path: float(each.bytes) for each in plan.inputs}
        results = zip(graph.output_paths, graph.outputs, plan.outputs[0], strict=True)
        for name, operand, spec in results:
            if isinstance(operand, int):
                parts = num_shards(spec, mesh.axis_sizes)
                held.setdefault(name, graph.tensors[operand].type.bytes / parts)
        read = [name for name in whole if name in state]
        gradients = [n for n in whole if self.cut.slots[n].kind == "gradient"]
        here, whole_here = sum(held[n] for n in read), sum(whole[n] for n in read)
        reducing, reduced = reduced_sums(plan, graph, Resharder(mesh, cluster))
        of_sums = sum(reduced[n] for n in gradients), sum(whole[n] for n in gradients)
        share = min(part_of_whole(*of_sums), part_of_whole(here, whole_here))
        if submesh.is_split:
            share = 1 / mesh.size
        others = sum(size for name, size in state.items() if name not in held)
        kept = sum(held[n] for n in self._kept_names)
        arguments = sum(each.bytes for each in plan.inputs if each.memory != "host")
        gathered = max(here - share * whole_here, 0.0)
        at_host = sum(self._all_state.values()) - sum(state.values())
        moved = 2 * share * at_host / cluster.device.host_memory_bandwidth
        link = cluster.link(mesh, mesh.axis_names)
        return LayerCost(
            plan.predicted.step_seconds,
            reducing
            + seconds_of(self._update, share, cluster)
            + moved
            + gathered * link.seconds_per_byte,
            here + share * others,
            sum(held[n] for n in gradients),
            kept,
            max(plan.predicted.peak_bytes - arguments - kept, 0.0),
            reducing,
        )


@dataclass
class LayerSamples:
    """A layer of every kind; `cut` cuts them out of a step of so many microbatches.

    `in_place`: what it cuts is the step's own graph, and one cut serves all numbers.
    """

    cut: Callable[[int], CutStep]
    chosen: Sequence[int]  # the stage of each kind in what is cut
    options: Options
    leaves: Sequence[Any]
    planner: ProgramPlanner
    in_place: bool
    known: dict[int, tuple[LayerSample, ...]] = field(default_factory=dict)

    def of(self, number: int) -> tuple[LayerSample, ...]:
        """The samples, by kind, for a number of microbatches."""
        key = 1 if self.in_place else number
        if key not in self.known:
            self.known[key] = self._samples(self.cut(key))
        return self.known[key]

    def _samples(self, made: CutStep) -> tuple[LayerSample, ...]:
        shapes = [MeshShape(("x",), (1,))] * made.cut.num_stages
        demands = stage_demands(made, self.leaves, self.options, shapes)
        cut = made.programs
        counter = Slot(COUNTER, "batch", 0)
        cut = replace(cut, slots={COUNTER: counter, **cut.slots})
        split = made.parts.step.split if self.in_place else None
        of_microbatch = [each for each in cut.programs if each.kind != "apply"]
        found: list[LayerSample] = []
        for stage in self.chosen:
            own = tuple(each for each in of_microbatch if each.stage == stage)
            joint = joint_program(own, made.parts.microbatch) or own[0]
            update = tuple(
                op
                for (home, _), operators in made.apply.operators.items()
                for op in operators
                if home == stage
            )
            asked = cut, demands, self.planner, joint, own, update, split
            found.append(LayerSample(*asked))
        return tuple(found)


def _flat(
    graph: OpGraph, operators: Iterable[Operator], times: float = 1.0
) -> Iterator[tuple[Operator, float]]:
    """Operators, those of bodies among them, with how often each runs."""
    for op in operators:
        if op.kind not in STRUCTURED:
            yield op, times
        for body in op.bodies:
            block = graph.blocks[body]
            more = times * block.weight / graph.blocks[op.block].weight
            yield from _flat(graph, block.operators, more)


def part_of_whole(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
