"""What each unit of a model costs on a mesh: planned once, priced at any size.

A model is traced at two sizes of a microbatch and planned by the project's own solver
on a mesh of (data, tensor) devices. Flops, bytes and collectives are affine in the
size, so two traces give them at any; their seconds come from a cluster's constants, by
the rules of `autopar/costs`, on arrays here. Phases of a unit are its forward pass,
what is recomputed, its backward pass, and what happens once a step: gradients are
summed, parameters gathered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

import autopar.rules  # noqa: F401  (registers every rule)
from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    collective_seconds,
)
from autopar.costs.compute import FUSED_FRACTION, is_fusable, is_heavy, operator_seconds
from autopar.costs.memory import memory_profile
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import SCAN, STRUCTURED, build_graph
from autopar.graph.op_graph import Operator, OpGraph
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.planning import roles_of
from autopar.planner.strategies import SLICING, total_flops
from autopar.plans.plan import OperatorPlan, ShardingPlan
from autopar.sharding.mesh import MeshShape
from autopar.sharding.resharding import Resharder
from autopar.sharding.spec import num_shards
from benchmarks.published.host_links import link_of
from benchmarks.published.layout_restriction import (
    EXPERT_AXIS,
    layout_restriction,
    microbatch_loop,
)
from benchmarks.published.unit_model import UnitModel
from benchmarks.published.weight_work import weight_tensors

FORWARD, RECOMPUTE, BACKWARD, WEIGHT, ONCE = range(5)
TRACED_MICROBATCHES = 64  # once-per-step work weighs so much less in the plan

_SCOPE = re.compile(r"unit_(\d+)")


@dataclass(frozen=True)
class Layout:
    """A stage's devices: hosts by devices of each, as (data, tensor) groups.

    Experts are split over all of `data`, or over so many neighbours as `experts` says.
    """

    hosts: int
    devices: int
    data: int
    tensor: int
    experts: int = 0

    @property
    def size(self) -> int:
        return self.hosts * self.devices

    @property
    def mesh(self) -> MeshShape:
        if self.experts:
            copies = self.data // self.experts
            return MeshShape(("data", EXPERT_AXIS), (copies, self.experts))
        return MeshShape(("data", "tensor"), (self.data, self.tensor))

    def __str__(self) -> str:
        parts = f", experts over {self.experts}" if self.experts else ""
        return f"({self.hosts};{self.devices}) as ({self.data};{self.tensor}){parts}"


@dataclass(frozen=True, eq=False)
class UnitSeconds:
    """Seconds of one microbatch (once: of a step) [units, phases], per instance.

    `WEIGHT` is the part of the backward pass that only gradients wait for.
    """

    compute: np.ndarray
    collective: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.collective


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """Work of one device, per instance of a unit; pairs are (fixed, for each example).

    `unit`, `phase` [operators] say whose an operator is and `scale` how often it runs;
    `flops`, `bytes` are pairs [2, operators]. `moves` are conversions of tensors.
    Bytes of parameters, what is kept from forward to backward, and the most that
    temporaries take are by unit.
    """

    layout: Layout
    unit: np.ndarray
    phase: np.ndarray
    scale: np.ndarray
    flops: np.ndarray
    bytes: np.ndarray
    is_fused: np.ndarray
    is_heavy: np.ndarray
    dtypes: tuple[str, ...]
    moves: tuple[Move, ...]
    param_bytes: np.ndarray
    gradient_bytes: np.ndarray
    kept_bytes: np.ndarray  # [2, units]
    temp_bytes: np.ndarray  # [2, units]

    def seconds(
        self,
        cluster: Cluster,
        size: float,
        fused_fraction: float = FUSED_FRACTION,
        unfused: Sequence[int] = (),
    ) -> UnitSeconds:
        """At `size` examples a microbatch; of `cluster` only the constants count.

        `fused_fraction` of the bytes of operators that can be fused reaches the memory;
        in the units `unfused` each is a kernel of its own.
        """
        num_flops = self.flops[0] + size * self.flops[1]
        moved = self.bytes[0] + size * self.bytes[1]
        fused = self.is_fused & ~np.isin(self.unit, unfused)
        moved = np.where(fused, fused_fraction * moved, moved)
        rates = _flops_per_second(cluster, self.dtypes, self.is_heavy, num_flops)
        each = ~fused * cluster.kernel_seconds + np.maximum(
            num_flops / rates, moved / cluster.device.bytes_per_second
        )
        compute = np.zeros((len(self.param_bytes), ONCE + 1))
        np.add.at(compute, (self.unit, self.phase), each * self.scale)
        collective = np.zeros_like(compute)
        mesh = self.layout.mesh
        for move in self.moves:
            amount = move.bytes[0] + size * move.bytes[1]
            link = link_of(cluster, mesh, move.axes)
            seconds = collective_seconds(move.kind, amount, link) * move.scale
            collective[move.unit, move.phase] += seconds
        collective[:, ONCE] *= cluster.visible_fraction
        return UnitSeconds(compute, collective)


@dataclass(frozen=True)
class Move:
    """A collective over some mesh axes: bytes of its result on a device, as pair."""

    unit: int
    phase: int
    scale: float
    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: tuple[float, float]


def unit_costs(model: UnitModel, layout: Layout, cluster: Cluster) -> UnitCosts:
    """The units' costs on a layout, planned with the constants of `cluster`."""
    small = _size_for(model, layout)
    low, high = traced_graph(model, small), traced_graph(model, 2 * small)
    limits = [layout_restriction(model, low, layout.mesh)]
    solved = plan_intra_op(low, layout.mesh, cluster, restrictions=limits, gap=1e-3)
    sizes = small, 2 * small
    return _Reader(model, layout, (low, high), sizes, solved.plan, cluster).read()


def _size_for(model: UnitModel, layout: Layout) -> int:
    """Examples that every layout of so many devices divides, in two groups or more."""
    at_once = model.examples_at_once
    size = math.lcm(32 * -(-layout.size // 16), layout.data * at_once)
    return size if size > at_once else 2 * size


@lru_cache(maxsize=64)
def traced_graph(model: UnitModel, size: int) -> OpGraph:
    microbatches = model.batch(TRACED_MICROBATCHES, size)
    traced = trace(model.step, (model.params, microbatches), {})
    return build_graph(traced, roles_of(traced))


class _Reader:
    """Reads the costs off a plan of the small graph, which the large one shares."""

    def __init__(
        self,
        model: UnitModel,
        layout: Layout,
        graphs: tuple[OpGraph, OpGraph],
        sizes: tuple[int, int],
        plan: ShardingPlan,
        cluster: Cluster,
    ) -> None:
        self.model, self.layout, self.plan = model, layout, plan
        self.resharder = Resharder(plan.mesh, cluster)
        self.graphs, self.graph, self.sizes = graphs, graphs[0], sizes
        self.axis_sizes = plan.mesh.axis_sizes
        self.loop = microbatch_loop(self.graph)
        self.unit_of = self._units()
        self.weights = weight_tensors(self.graph, self.loop, self.unit_of)

    def read(self) -> UnitCosts:
        rows = list(self._operators())
        unit, phase, scale, low, high, fused, heavy, dtypes = zip(*rows, strict=True)
        work = _affine(low, high, self.sizes)  # [2, operators, flops and bytes]
        params, gradients = self._state_bytes()
        kept, temp = self._memory()
        return UnitCosts(
            self.layout,
            *(np.array(unit), np.array(phase), np.array(scale)),
            *(work[..., 0], work[..., 1], np.array(fused), np.array(heavy)),
            tuple(dtypes),
            tuple(self._moves()),
            *(params, gradients, kept, temp),
        )

    def _units(self) -> dict[int, int]:
        """The unit of each tensor: by its scope, or where it comes from or goes to."""
        found: dict[int, int] = {}
        for tensor in self.graph.tensors:
            scopes = _SCOPE.findall(tensor.name)
            if scopes:
                found[tensor.index] = int(scopes[-1])
        for op in self.graph.operators():
            for body in op.bodies:
                inputs = self.graph.blocks[body].inputs
                for operand, inner in zip(op.operands, inputs, strict=False):
                    if isinstance(operand, int) and operand in found:
                        found.setdefault(inner, found[operand])
        body = self.graph.blocks[self.loop.bodies[0]]
        for leaf, made in enumerate(body.outputs):
            unit = found[self.graph.inputs[leaf].tensor]
            for tensor in (made, self.loop.results[leaf]):
                if isinstance(tensor, int):
                    found[tensor] = unit
        return found

    def _phase(self, index: int) -> int:
        """The phase in which a tensor is made."""
        tensor = self.graph.tensors[index]
        if tensor.block == 0:
            return ONCE
        if "rematted_computation" in tensor.name:
            return RECOMPUTE
        is_sum = index in self.graph.blocks[self.loop.bodies[0]].outputs
        if not is_sum and "transpose(" not in tensor.name:
            return FORWARD
        return WEIGHT if index in self.weights else BACKWARD

    def _scale(self, unit: int, block: int) -> float:
        """Executions for one instance and microbatch (once: for one instance)."""
        weight = self.graph.blocks[block].weight / self.model.counts[unit]
        return weight if block == 0 else weight / TRACED_MICROBATCHES

    def _operators(self) -> Iterator[tuple[object, ...]]:
        pairs = zip(*(graph.operators() for graph in self.graphs), strict=True)
        for (low, high), planned in zip(pairs, self.plan.operators, strict=True):
            if low.block == 0 or low.kind in STRUCTURED:
                continue  # the update is priced by the bytes of the optimizer's state
            works = [self._work(op, planned) for op in (low, high)]
            if operator_seconds(low.kind, *works[0], "float32", _ANY) == 0.0:
                continue  # views and shapes
            unit = self.unit_of.get(low.results[0], 0)
            fused = is_fusable(low.kind)
            types = (each.dtype for each in low.operand_types if not each.is_extended)
            yield (
                *(unit, self._phase(low.results[0])),
                self._scale(unit, low.block),
                *works,
                *(fused, is_heavy(low.kind)),
                getattr(next(types, None), "name", "float32"),
            )

    def _work(self, op: Operator, planned: OperatorPlan) -> tuple[float, float]:
        """Flops and bytes of one device, as `plan_price.plan_seconds` has them."""
        skipped = op.kind in SLICING
        kinds = (*op.operand_types[skipped:], *op.result_types)
        specs = (*planned.operand_specs[skipped:], *planned.result_specs)
        moved = sum(
            kind.bytes / num_shards(spec, self.axis_sizes)
            for kind, spec in zip(kinds, specs, strict=True)
        )
        return total_flops(op) / planned.split, moved

    def _moves(self) -> Iterator[Move]:
        for index, tensor in enumerate(self.plan.tensors):
            unit = self.unit_of.get(index, 0)
            low, high = (graph.tensors[index].type.bytes for graph in self.graphs)
            fixed, slope = _affine(low, high, self.sizes).tolist()
            for each in tensor.conversions:
                for step in self.resharder.steps(each.source, each.target):
                    if step.kind in COLLECTIVE_KINDS:
                        names = tuple(self.plan.mesh.axis_names[a] for a in step.axes)
                        amount = fixed * step.fraction, slope * step.fraction
                        yield Move(
                            *(unit, self._phase(index)),
                            *(self._scale(unit, tensor.block), step.kind, names),
                            amount,
                        )

    def _state_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of parameters as the loop reads them, and of the gradients' sums."""
        held = np.zeros((2, len(self.model.units)))
        for leaf, result in enumerate(self.loop.results):
            given = self.graph.inputs[leaf].tensor
            planned = self.plan.tensors[given]
            specs = [planned.spec, *(each.target for each in planned.conversions)]
            unit = self.unit_of[given]
            whole = self.graph.tensors[given].type.bytes / self.model.counts[unit]
            held[0, unit] += whole / min(num_shards(s, self.axis_sizes) for s in specs)
            spec = self.plan.tensors[result].spec
            held[1, unit] += whole / num_shards(spec, self.axis_sizes)
        return held[0], held[1]

    def _memory(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes kept from forward to backward, and of temporaries, as pairs by unit."""
        measured = []
        for graph in self.graphs:
            kept = np.zeros(len(self.model.units))
            temp = np.zeros(len(self.model.units))
            profile = memory_profile(graph, self.plan)
            for op in graph.blocks[self.loop.bodies[0]].operators:
                unit = self.unit_of.get(op.results[0], 0) if op.results else 0
                if op.kind == SCAN and "transpose(" in op.name:
                    temp[unit] = profile.blocks[op.bodies[0]].peak_bytes
                elif op.kind == SCAN:
                    for result in op.results[op.params["num_carry"] :]:
                        local = self._local(graph, result)
                        kept[unit] += local / self.model.counts[unit]
            for unit in range(len(self.model.units)):
                if self.model.counts[unit] == 1:
                    temp[unit] = self._largest(graph, unit)
            measured.append((kept, temp))
        (kept_low, temp_low), (kept_high, temp_high) = measured
        return (
            _affine(kept_low, kept_high, self.sizes),
            _affine(temp_low, temp_high, self.sizes),
        )

    def _local(self, graph: OpGraph, tensor: int) -> float:
        spec = self.plan.tensors[tensor].spec
        return graph.tensors[tensor].type.bytes / num_shards(spec, self.axis_sizes)

    def _largest(self, graph: OpGraph, unit: int) -> float:
        """Twice the largest value of a unit: it and its cotangent."""
        body = graph.blocks[self.loop.bodies[0]]
        made = [t for op in body.operators for t in op.results]
        inside = [t for t in made if self.unit_of.get(t) == unit]
        largest = max((self._local(graph, t) for t in inside), default=0.0)
        return 2 * largest


_ANY = Cluster.preset("V100")


def _affine(low: object, high: object, sizes: tuple[int, int]) -> np.ndarray:
    """Values at two sizes as pairs (at size 0, for each example) along a new dim 0."""
    first, second = np.asarray(low, float), np.asarray(high, float)
    slope = (second - first) / (sizes[1] - sizes[0])
    return np.array([first - slope * sizes[0], slope])


def _flops_per_second(
    cluster: Cluster,
    dtypes: Sequence[str],
    heavy: np.ndarray,
    num_flops: np.ndarray,
) -> np.ndarray:
    """As `Device.flops_per_second` of each operator; sizes count for heavy ones."""
    rates = np.empty(len(dtypes))
    names, sizes = np.array(dtypes), np.where(heavy, np.maximum(num_flops, 1), np.inf)
    for name in set(dtypes):
        chosen = names == name
        rates[chosen] = cluster.device.flops_per_second(name, sizes[chosen])
    return rates
