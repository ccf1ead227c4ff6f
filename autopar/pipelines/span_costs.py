"""What layers cost on a submesh: seconds, and bytes of state and of microbatches.

A layer of every kind (`layers.py`) is cut out as a stage of its own, and its forward
and backward planned as one program (`stage_planner.py`). Spans add their layers up:
costs are affine in the number of equal layers. Layers are sampled with two sizes of
microbatch, and what lies between is interpolated, as launches are paid for each
microbatch and all else for each example. Until a submesh is looked at, its costs are
those of work shared out evenly with nothing sent (`ideal`), which nothing goes below.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from autopar.solver.stage_problem import StageChoice

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Operator, OpGraph
from ..options import Options
from ..planner.strategies import SLICING, total_flops
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from .cut_step import CutStep
from .layers import Layers
from .stage_pieces import Piece, TracedPiece, joint_piece
from .stage_planner import StagePlanner
from .stage_programs import PipelineBuilder

PLAN_GAP = 0.02


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes on one device of a submesh.

    `seconds` are of a microbatch, forward and backward, `once_seconds` of the update.
    `state_bytes` are parameters and what the optimizer keeps, `gradient_bytes` their
    sums, `microbatch_bytes` what backward waits for; `working_bytes` come and go.
    """

    seconds: float = 0.0
    once_seconds: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    microbatch_bytes: float = 0.0
    working_bytes: float = 0.0

    def between(self, other: LayerCost, share: float) -> LayerCost:
        """The cost `share` of the way to another, by parts."""
        return LayerCost(
            *(
                max((1 - share) * a + share * b, 0.0)
                for a, b in zip(_values(self), _values(other), strict=True)
            )
        )


def _values(cost: LayerCost) -> list[float]:
    return [getattr(cost, each.name) for each in fields(cost)]


@dataclass(frozen=True)
class Submesh:
    """A logical mesh of a stage, and whether its state lies in as many parts."""

    mesh: MeshShape
    is_split: bool

    def __str__(self) -> str:
        return f"{self.mesh}{', state split' if self.is_split else ''}"


@dataclass(frozen=True, eq=False)
class LayerSample:
    """A layer of one kind as a stage: its programs on a microbatch as one."""

    builder: PipelineBuilder
    joint: Piece
    traced: TracedPiece
    own: tuple[Piece, ...]
    update: tuple[Operator, ...]
    num_layers: int

    @property
    def stage(self) -> int:
        return self.joint.stage

    def cost(self, submesh: Submesh, cluster: Cluster) -> LayerCost:
        """As the solver plans it there."""
        number = len(self.builder.shapes)
        split = frozenset({self.stage} if submesh.is_split else ())
        builder = replace(
            self.builder,
            shapes=[submesh.mesh] * number,
            split=split,
            specs={},
            wanted={},
        )
        plan = builder.solve(self.joint, self.traced.graph, PLAN_GAP)
        return self._scaled(self._planned(plan, submesh, cluster))

    def ideal(self, num_devices: int, cluster: Cluster) -> LayerCost:
        """If every device did an equal part and nothing were sent."""
        whole = {n: t.size * t.dtype.itemsize for n, t in self._types().items()}
        share = 1 / num_devices
        return self._scaled(
            LayerCost(
                seconds_of(self.traced.graph, share, cluster),
                _update_seconds(self.update, share, cluster),
                share * sum(self._state().values()),
                share * sum(self._bytes_of("gradient", whole)),
                share * sum(whole[n] for n in self._kept_names()),
                0.0,
            )
        )

    def _scaled(self, cost: LayerCost) -> LayerCost:
        number = self.num_layers
        shared = LayerCost(*(each / number for each in _values(cost)))
        return replace(shared, working_bytes=cost.working_bytes)

    def _types(self) -> dict[str, Any]:
        types: dict[str, Any] = dict(
            zip(self.traced.inputs, self.traced.structs, strict=True)
        )
        graph = self.traced.graph
        for name, operand in zip(graph.output_paths, graph.outputs, strict=True):
            if isinstance(operand, int):
                kind = graph.tensors[operand].type
                types.setdefault(name, kind)
        return types

    def _bytes_of(self, kind: str, by_name: Mapping[str, float]) -> Iterator[float]:
        slots = self.builder.slots
        return (
            by_name[name] for name in self.traced.inputs if slots[name].kind == kind
        )

    def _state(self) -> dict[str, float]:
        """Bytes of all state of the stage, by slot."""
        update = self.builder.parts.apply
        sizes = {i.path: update.tensors[i.tensor].type.bytes for i in update.inputs}
        return {
            name: float(sizes[name])
            for name, slot in self.builder.slots.items()
            if slot.kind == "state" and slot.stage == self.stage and name in sizes
        }

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
        self, plan: ShardingPlan, submesh: Submesh, cluster: Cluster
    ) -> LayerCost:
        graph, sizes = self.traced.graph, submesh.mesh
        held = {each.path: float(each.bytes) for each in plan.inputs}
        types = self._types()
        whole = {n: float(t.size * t.dtype.itemsize) for n, t in types.items()}
        for position, name in enumerate(graph.output_paths):
            if name not in held and name in whole:
                spec = plan.outputs[0][position]
                parts = np.prod(
                    [n for n, s in zip(sizes.axis_sizes, spec, strict=True) if s >= 0]
                )
                held[name] = whole[name] / float(parts)
        state = self._state()
        read = [n for n in self.traced.inputs if n in state]
        gradients = [
            n for n in self.traced.inputs if self.builder.slots[n].kind == "gradient"
        ]
        here = sum(held[n] for n in read)
        share = _share(sum(held[n] for n in gradients), sum(map(whole.get, gradients)))  # type: ignore[arg-type]
        share = min(share, _share(here, sum(whole[n] for n in read)))
        if submesh.is_split:
            share = 1 / sizes.size
        others = sum(size for name, size in state.items() if name not in held)
        kept = sum(held[n] for n in self._kept_names())
        arguments = sum(each.bytes for each in plan.inputs)
        gathered = max(here - share * sum(whole[n] for n in read), 0.0)
        link = cluster.link(sizes, sizes.axis_names)
        return LayerCost(
            plan.predicted.step_seconds,
            _update_seconds(self.update, share, cluster)
            + gathered * link.seconds_per_byte,
            here + share * others,
            sum(held[n] for n in gradients),
            kept,
            max(plan.predicted.peak_bytes - arguments - kept, 0.0),
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def sample_layers(
    made: CutStep,
    spans: Mapping[int, int],
    options: Options,
    planner: StagePlanner,
) -> tuple[LayerSample, ...]:
    """The stages of a cut step that hold samples; `spans` is their layers by stage."""
    shapes = [MeshShape(("x",), (1,))] * made.cut.num_stages
    builder = made.builder(shapes, options, planner=planner)
    pieces = builder.microbatch_pieces()
    builder.apply_pieces()
    found = []
    for stage, number in spans.items():
        own = tuple(each for each in pieces if each.stage == stage)
        joint = joint_piece(own, made.parts.microbatch) or own[0]
        update = [
            op
            for (home, _), operators in made.apply.operators.items()
            for op in operators
            if home == stage
        ]
        traced = builder.trace_piece(joint)
        found.append(LayerSample(builder, joint, traced, own, tuple(update), number))
    return tuple(found)


def seconds_of(graph: OpGraph, share: float, cluster: Cluster) -> float:
    """Seconds of a program of which each device does a share, and nothing is sent."""
    return sum(
        _operator_seconds(op, share, cluster) * graph.blocks[op.block].weight
        for op in graph.operators()
    )


def _update_seconds(
    operators: Sequence[Operator], share: float, cluster: Cluster
) -> float:
    return sum(_operator_seconds(op, share, cluster) for op in operators)


def _operator_seconds(op: Operator, share: float, cluster: Cluster) -> float:
    if op.kind in STRUCTURED:
        return 0.0
    read = op.operand_types[op.kind in SLICING :]
    num_bytes = sum(kind.bytes for kind in (*read, *op.result_types))
    dtypes = [kind.dtype for kind in op.operand_types if not kind.is_extended]
    return operator_seconds(
        op.kind,
        total_flops(op) * share,
        num_bytes * share,
        dtypes[0] if dtypes else "float32",
        cluster,
    )


@dataclass
class SpanCosts:
    """Costs of all spans of layers on submeshes, sampled when they are asked for.

    `samples` are by number of microbatches, then by kind of layer.
    """

    layers: Layers
    cluster: Cluster
    samples: dict[int, Sequence[LayerSample]]
    known: dict[tuple[Submesh, int, int], LayerCost] = field(default_factory=dict)
    ideals: dict[tuple[int, int, int], LayerCost] = field(default_factory=dict)

    def is_known(self, submesh: Submesh, number: int) -> bool:
        """Whether all is planned that its costs stand on."""
        return all((submesh, n, 0) in self.known for n in self._nearest(number))

    def look_at(self, submesh: Submesh) -> None:
        """Plan all samples on a submesh."""
        for number, samples in self.samples.items():
            for kind, sample in enumerate(samples):
                if (submesh, number, kind) not in self.known:
                    cost = sample.cost(submesh, self.cluster)
                    self.known[submesh, number, kind] = cost

    def cost(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer of a kind, with a number of microbatches."""
        few, many = self._nearest(number)
        first, last = (self._sampled(submesh, n, kind) for n in (few, many))
        if few == many:
            return first
        share = (1 / few - 1 / number) / (1 / few - 1 / many)
        return first.between(last, share)

    def _nearest(self, number: int) -> tuple[int, int]:
        """The sampled numbers of microbatches on both sides of one, or itself."""
        if number in self.samples:
            return number, number
        fewer = [each for each in self.samples if each < number]
        more = [each for each in self.samples if each > number]
        return max(fewer), min(more)

    def _sampled(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        if (submesh, number, kind) in self.known:
            return self.known[submesh, number, kind]
        key = submesh.mesh.size, number, kind
        if key not in self.ideals:
            sample = self.samples[number][kind]
            self.ideals[key] = sample.ideal(submesh.mesh.size, self.cluster)
        return self.ideals[key]

    def choice(self, submesh: Submesh, number: int) -> StageChoice:
        """The submesh as the solver sees it."""
        by_kind = [
            self.cost(submesh, number, kind)
            for kind in range(len(self.samples[min(self.samples)]))
        ]
        costs = [by_kind[kind] for kind in self.layers.kinds]

        def summed(values: Sequence[float]) -> np.ndarray:
            done = np.concatenate([[0.0], np.cumsum(values)])
            return done[None, :] - done[:, None]

        size = len(costs) + 1
        working = np.zeros((size, size))
        for first in range(len(costs)):
            rest = [each.working_bytes for each in costs[first:]]
            working[first, first + 1 :] = np.maximum.accumulate(rest)
        label: Hashable = submesh
        return StageChoice(
            label,
            submesh.mesh.size,
            summed([c.seconds for c in costs]),
            summed([c.once_seconds for c in costs]),
            summed([c.state_bytes + c.gradient_bytes for c in costs]) + working,
            summed([c.microbatch_bytes for c in costs]),
        )
