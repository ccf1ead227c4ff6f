"""Layers cut out of a step as stages of their own, on a microbatch of any size.

The step is cut once, at the borders of one layer of each kind, as it lies in its own
graph; for a number of microbatches, the operators of these layers alone are traced
again. Where a microbatch is a batch of its own ("independent"), it is another trace,
and the step is cut for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..clusters.cluster import Cluster
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Constant, Operator, OpGraph
from ..lowering.blocks import as_array
from ..microbatches.microbatch_runners import MicrobatchRunner
from ..microbatches.microbatches import MicrobatchSplit
from ..options import Options
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.resharding import Resharder
from ..sharding.spec import SUM
from .cut_step import CutStep
from .layer_costs import (
    LayerCost,
    Work,
    most_reducing_seconds,
    reduced_sums,
    summed_work,
)
from .stage_pieces import Piece, TracedPiece, joint_piece, own_sums
from .stage_planner import StagePlanner
from .stage_programs import PipelineBuilder
from .stage_trace import COUNTER, graph_of

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

    builder: PipelineBuilder
    joint: Piece
    own: tuple[Piece, ...]
    update: tuple[Operator, ...]
    split: MicrobatchSplit | None
    programs: dict[int, TracedPiece] = field(default_factory=dict)
    seconds: dict[tuple[bool, float, Cluster], float] = field(default_factory=dict)

    def cost(self, submesh: Submesh, number: int, cluster: Cluster) -> LayerCost:
        """Of one of `number` microbatches, as the solver plans it there."""
        builder = replace(
            self.builder,
            shapes=[submesh.mesh] * len(self.builder.shapes),
            split=frozenset({self.joint.stage} if submesh.is_split else ()),
            clusters=[cluster] * len(self.builder.shapes),
            specs={},
            wanted={},
        )
        traced = self.traced(number)
        plan = builder.solve(self.joint, traced.graph, PLAN_GAP)
        return self._planned(plan, traced, submesh, cluster)

    def ideal(self, num_devices: int, number: int, cluster: Cluster) -> LayerCost:
        """If every device did an equal part and nothing were sent."""
        share, sizes = 1 / num_devices, self._slot_bytes

        def held(names: Iterable[str]) -> float:
            parts = (sizes.get(name, (0.0, False)) for name in names)
            return share * sum(each / number if cut else each for each, cut in parts)

        return LayerCost(
            self._seconds(False, share, cluster)
            + self._seconds(True, share / number, cluster),
            self._update_seconds(share, cluster),
            share * sum(self._state.values()),
            held(self.joint.added),
            held(self._kept_names),
        )

    def _seconds(self, is_cut: bool, share: float, cluster: Cluster) -> float:
        """Of work that a microbatch does a part of, or not, if a device does a share;
        known from other numbers of devices and microbatches with the same product."""
        key = is_cut, share, cluster
        if key not in self.seconds:
            work = self._work[is_cut]
            self.seconds[key] = sum(each.seconds(share, cluster) for each in work)
        return self.seconds[key]

    def most_reducing_seconds(self, mesh: MeshShape, cluster: Cluster) -> float:
        """What the update takes for sums that come as parts of all devices."""
        graph, sums = self.builder.parts.microbatch, self.builder.sums
        made = (self.joint.outputs[name] for name in self.joint.added if name in sums)
        kinds = (graph.tensors[each].type for each in made if isinstance(each, int))
        return most_reducing_seconds(kinds, Resharder(mesh, cluster))

    def traced(self, number: int) -> TracedPiece:
        """The program of one of `number` microbatches."""
        if number not in self.programs:
            if self.split is None:
                traced = self.builder.trace_piece(self.joint)
            else:
                split = replace(self.split, num_microbatches=number)
                traced = _trace_part(self.builder, self.joint, split)
            self.programs[number] = traced
        return self.programs[number]

    @cached_property
    def _slot_bytes(self) -> dict[str, tuple[float, bool]]:
        """Bytes of what the program reads and returns, by slot, in all; and whether a
        microbatch has a part of it."""
        graph, found = self.builder.parts.microbatch, dict[str, tuple[float, bool]]()
        for name, operand in (*self.joint.inputs.items(), *self.joint.outputs.items()):
            if isinstance(operand, int):
                is_cut = self.split is not None and self.split.state[operand] >= 0
                found[name] = float(graph.tensors[operand].type.bytes), is_cut
        return found

    @cached_property
    def _work(self) -> tuple[list[Work], list[Work]]:
        """What there is to do whole, and what a microbatch does a part of."""
        of_all: list[tuple[Operator, float]] = []
        of_part: list[tuple[Operator, float]] = []
        for op, times in _flat(self.builder.parts.microbatch, self.joint.operators):
            factor = None if self.split is None else self.split.factor.get(op.index)
            is_cut = factor is not None and factor.splits
            (of_part if is_cut else of_all).append((op, times))
        return summed_work(of_all), summed_work(of_part)

    def _update_seconds(self, share: float, cluster: Cluster) -> float:
        return sum(work.seconds(share, cluster) for work in self._update)

    @cached_property
    def _update(self) -> list[Work]:
        return summed_work((op, 1.0) for op in self.update if not op.bodies)

    @cached_property
    def _state(self) -> dict[str, float]:
        """Bytes of all state of the stage that its devices hold, by slot."""
        sizes = self._all_state.items()
        return {n: size for n, size in sizes if n not in self.builder.host}

    @cached_property
    def _all_state(self) -> dict[str, float]:
        update = self.builder.parts.apply
        sizes = {i.path: update.tensors[i.tensor].type.bytes for i in update.inputs}
        return {
            name: float(sizes[name])
            for name, slot in self.builder.slots.items()
            if slot.kind == "state" and slot.stage == self.joint.stage and name in sizes
        }

    def _moving_seconds(self, share: float, cluster: Cluster) -> float:
        """Of the update, for state that comes from the host's memory and goes back."""
        kept = sum(n for name, n in self._all_state.items() if name not in self._state)
        return 2 * share * kept / cluster.device.host_memory_bandwidth

    @cached_property
    def _kept_names(self) -> list[str]:
        """Slots of a microbatch that forward has at hand and backward reads."""
        slots = self.builder.slots
        forward = {
            name
            for piece in self.own
            if piece.kind == "forward"
            for name in (*piece.inputs, *piece.outputs)
        }
        read = {
            name
            for piece in self.own
            if piece.kind != "forward"
            for name in piece.inputs
        }
        kinds = ("activation", "batch")
        return [n for n in sorted(forward & read) if slots[n].kind in kinds]

    def _planned(
        self,
        plan: ShardingPlan,
        traced: TracedPiece,
        submesh: Submesh,
        cluster: Cluster,
    ) -> LayerCost:
        graph, mesh = traced.graph, submesh.mesh
        whole = {
            name: float(struct.size * struct.dtype.itemsize)
            for name, struct in zip(traced.inputs, traced.structs, strict=True)
        }
        held = {each.path: float(each.bytes) for each in plan.inputs}
        specs = plan.outputs[0]
        for name, operand, spec in zip(
            graph.output_paths, graph.outputs, specs, strict=True
        ):
            if isinstance(operand, int) and name not in held:
                axes = zip(mesh.axis_sizes, spec, strict=True)
                parts = prod([size for size, state in axes if state >= 0])
                held[name] = graph.tensors[operand].type.bytes / parts
        state = self._state
        read = [n for n in traced.inputs if n in state]
        gradients = [
            n for n in traced.inputs if self.builder.slots[n].kind == "gradient"
        ]
        here = sum(held[n] for n in read)
        reducing, reduced = reduced_sums(plan, graph, Resharder(mesh, cluster))
        share = _share(
            sum(reduced[n] for n in gradients), sum(whole[n] for n in gradients)
        )
        share = min(share, _share(here, sum(whole[n] for n in read)))
        if submesh.is_split:
            share = 1 / mesh.size
        others = sum(size for name, size in state.items() if name not in held)
        kept = sum(held[n] for n in self._kept_names)
        arguments = sum(each.bytes for each in plan.inputs if each.memory != "host")
        gathered = max(here - share * sum(whole[n] for n in read), 0.0)
        link = cluster.link(mesh, mesh.axis_names)
        return LayerCost(
            plan.predicted.step_seconds,
            reducing
            + self._update_seconds(share, cluster)
            + self._moving_seconds(share, cluster)
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
    planner: StagePlanner
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
        builder = made.builder(shapes, self.options, planner=self.planner)
        pieces = builder.microbatch_pieces()
        builder.sums = own_sums([*pieces, *builder.apply_pieces()], builder.slots)
        builder.slot(COUNTER, "batch", 0)
        found: list[LayerSample] = []
        for stage in self.chosen:
            own = tuple(each for each in pieces if each.stage == stage)
            joint = joint_piece(own, made.parts.microbatch) or own[0]
            update = [
                op
                for (home, _), operators in made.apply.operators.items()
                for op in operators
                if home == stage
            ]
            split = made.step.split if self.in_place else None
            found.append(LayerSample(builder, joint, own, tuple(update), split))
        return tuple(found)


def _trace_part(
    builder: PipelineBuilder, piece: Piece, split: MicrobatchSplit
) -> TracedPiece:
    """The program of a microbatch of a piece, whose graph is of the whole batch."""
    graph = builder.parts.microbatch
    names = (*piece.inputs, *piece.added, COUNTER)

    def struct(operand: int | Constant) -> jax.ShapeDtypeStruct:
        kind = (
            operand.type
            if isinstance(operand, Constant)
            else graph.tensors[operand].type
        )
        shape, state = list(kind.shape), SUM
        if isinstance(operand, int):
            state = split.state[operand]
        if state >= 0:
            shape[state] //= split.num_microbatches
        return jax.ShapeDtypeStruct(tuple(shape), kind.dtype)

    def task(*values: Any) -> list[Any]:
        given = dict(zip(names, values, strict=True))
        runner = MicrobatchRunner(graph, split, {}, given[COUNTER])
        runner.values.update({t: given[name] for name, t in piece.inputs.items()})
        runner.run_operators(piece.operators)
        found = []
        for name, operand in piece.outputs.items():
            if isinstance(operand, Constant):
                value = as_array(operand.value)
            elif name in builder.parts.sums:
                value = runner.read(operand, SUM)
            else:
                value = as_array(runner.values[operand])
            found.append(given[name] + value if name in piece.added else value)
        return found

    task.__name__ = f"{piece.kind}_{piece.stage}"
    operands = [*piece.inputs.values(), *(piece.outputs[n] for n in piece.added)]
    structs = (*map(struct, operands), jax.ShapeDtypeStruct((), jnp.uint32))
    outputs = list(piece.outputs)
    ties = tuple(
        outputs.index(name)
        if name in piece.outputs
        and (name in piece.added or builder.slots[name].kind == "state")
        else None
        for name in names
    )
    part = graph_of(task, structs, names, outputs, ties)
    part = builder.with_roles(part, split.num_microbatches)
    return TracedPiece(part, structs, names, ties)


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


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
