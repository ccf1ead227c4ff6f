"""Choose how every operator is split: build the problem, solve it, read the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import networkx

from autopar.solver.assignment import Assignment
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..costs.collectives import COLLECTIVE_KINDS, collective_seconds
from ..costs.host_memory import host_seconds
from ..costs.memory import peak_bytes
from ..frontend.garbage import without_garbage_collection
from ..graph.build_graph import SHARD_MAP, STRUCTURED
from ..graph.op_graph import Block, Constant, Operator, OpGraph
from ..graph.user_shard_map import body_collectives, body_work
from ..methods.restrictions import Limit, restrict
from ..plans.plan import (
    Conversion,
    InputPlan,
    OperatorPlan,
    Prediction,
    ShardingPlan,
    TensorPlan,
    total_bytes,
)
from ..rules.base import rule_of, warn_fallback
from ..sharding.collective import Collective, Surroundings
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.resharding import Resharder, wire_dtype
from ..sharding.spec import MAX, MIN, SUM, Spec, num_shards, replicated
from .overlap import visible_fractions
from .sharding_problem import ShardingProblem, build_problem
from .strategies import is_heavy_operator, total_flops

_REDUCTION_NAMES = {SUM: "sum", MAX: "max", MIN: "min"}


@dataclass(frozen=True)
class IntraOpSolution:
    """The plan, and the solver's account of how it was found."""

    plan: ShardingPlan
    assignment: Assignment


@without_garbage_collection
def plan_intra_op(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
    gap: float = 1e-4,
) -> IntraOpSolution:
    """The cheapest sharding plan of `graph` on `mesh`, with its bound.

    `pins` are those of arguments, by tensor, and `restrictions` what a method leaves to
    the solver, on this mesh. `gap` is the relative distance from the
    bound at which the solver stops.
    """
    resharder = Resharder(mesh, cluster)
    problem = build_problem(graph, mesh, cluster, resharder, pins)
    problem = restrict(problem, restrictions, cluster)
    assignment = solve(problem.choice_graph, gap=gap)
    plan = read_plan(problem, assignment, cluster, resharder)
    return IntraOpSolution(plan, assignment)


@without_garbage_collection
def read_plan(
    problem: ShardingProblem,
    assignment: Assignment,
    cluster: Cluster,
    resharder: Resharder,
) -> ShardingPlan:
    """The plan that an assignment of the problem stands for."""
    graph, mesh = problem.graph, problem.mesh
    reader = _Reader(problem, assignment.choices, resharder)
    tensors = tuple(reader.tensor_plan(t.index) for t in graph.tensors)
    operators = tuple(reader.operator_plan(op) for op in graph.operators())
    trips = tuple(block.trip_count for block in graph.blocks)
    collectives, collective_seconds = _collectives(graph, tensors, resharder)
    compute_seconds = sum(op.seconds for op in operators)
    inputs = tuple(reader.input_plans())
    moving_seconds = host_seconds(graph.inputs, inputs, cluster)
    plan = ShardingPlan(
        function=graph.name,
        mesh=mesh,
        cluster=cluster.name,
        inputs=inputs,
        operators=operators,
        tensors=tensors,
        outputs=tuple(reader.outputs()),
        trip_counts=trips,
        collectives=collectives,
        predicted=Prediction(
            step_seconds=compute_seconds + collective_seconds + moving_seconds,
            compute_seconds=compute_seconds,
            collective_seconds=collective_seconds,
            collective_bytes=total_bytes(collectives),
            peak_bytes=0,
            bubble_fraction=0.0,
            optimality_gap=float(assignment.gap),
            split_flops_fraction=_split_fraction(graph, operators, mesh),
            host_seconds=moving_seconds,
            host_bytes=sum(each.bytes for each in inputs if each.memory == "host"),
        ),
    )
    return _with_peak(graph, plan)


def _with_peak(graph: OpGraph, plan: ShardingPlan) -> ShardingPlan:
    predicted = replace(plan.predicted, peak_bytes=peak_bytes(graph, plan))
    return replace(plan, predicted=predicted)


class _Reader:
    def __init__(
        self,
        problem: ShardingProblem,
        choices: Sequence[int],
        resharder: Resharder,
    ) -> None:
        self.problem, self.graph = problem, problem.graph
        self.resharder = resharder
        self.whole = replicated(problem.mesh.num_axes)
        self.read_spec: dict[object, Spec] = {}
        self.needed: dict[int, list[Spec]] = {}
        self.vertex_of: dict[int, tuple[int, int]] = {}
        for index, (vertex, choice) in enumerate(
            zip(problem.vertices, choices, strict=True)
        ):
            if vertex.operator is not None:
                self.vertex_of[vertex.operator] = (index, choice)
            for access in vertex.reads:
                if access.site is not None:
                    spec = access.choices.of(choice)
                    self.read_spec[access.site] = spec
                    self.needed.setdefault(access.tensor, []).append(spec)
        self.made: dict[int, Spec] = {}
        for tensor, (vertex, access) in problem.writers.items():
            self.made[tensor] = access.choices.of(choices[vertex])
        self._conversions: dict[object, tuple[Conversion, ...]] = {}
        self._work: dict[object, tuple[tuple[str, ...], int, float]] = {}
        self.relayed: dict[int, Spec] = {}
        for tensor, vertex in problem.relays.items():
            access = problem.vertices[vertex].writes[0]
            self.relayed[tensor] = access.choices.of(choices[vertex])

    def tensor_plan(self, index: int) -> TensorPlan:
        tensor = self.graph.tensors[index]
        made = self.made[index]
        needed = tuple(dict.fromkeys(self.needed.get(index, ())))
        key = (made, needed, self.relayed.get(index), tensor.type.bytes)
        conversions = self._conversions.get(key)
        if conversions is None:
            conversions = cheapest_copies(*key, self.resharder)
            self._conversions[key] = conversions
        return TensorPlan(
            tensor.name,
            tensor.type.shape,
            dtype_name(tensor.type.dtype),
            tensor.block,
            made,
            conversions,
        )

    def operator_plan(self, op: Operator) -> OperatorPlan:
        read, whole, made = self.read_spec, self.whole, self.made
        operand_specs = tuple(
            [
                read.get(("operand", op.index, position), whole)
                for position in range(len(op.operands))
            ]
        )
        result_specs = tuple([made[result] for result in op.results])
        weight = self.graph.blocks[op.block].weight
        if op.index not in self.vertex_of:  # a scan or barrier: its ports decide
            num_flops = seconds = 0.0
            if op.kind == SHARD_MAP:
                num_flops, seconds = body_work(op, self.resharder.cluster)
            return OperatorPlan(
                op.name,
                op.kind,
                op.source,
                (),
                operand_specs,
                result_specs,
                num_flops * weight * self.problem.mesh.size,
                self.problem.mesh.size if num_flops else 1,
                seconds * weight,
            )
        index, choice = self.vertex_of[op.index]
        vertex = self.problem.vertices[index]
        assert vertex.strategies is not None
        key = id(vertex.strategies), choice  # operators of a kind share them
        if key not in self._work:
            names = tuple(factor.name for factor in vertex.strategies.chosen(choice))
            split = round(1.0 / vertex.strategies.share[choice])
            self._work[key] = names, split, total_flops(op)
        names, split, num_flops = self._work[key]
        return OperatorPlan(
            op.name,
            op.kind,
            op.source,
            names,
            operand_specs,
            result_specs,
            num_flops * weight,
            split,
            float(vertex.seconds[choice]),
        )

    def outputs(self) -> Iterable[tuple[Spec, ...]]:
        for block in self.graph.blocks:
            yield tuple(
                self.read_spec.get(("output", block.index, position), self.whole)
                if not isinstance(operand, Constant)
                else self.whole
                for position, operand in enumerate(block.outputs)
            )

    def input_plans(self) -> Iterable[InputPlan]:
        sizes = self.problem.mesh.axis_sizes
        for graph_input in self.graph.inputs:
            kind = self.graph.tensors[graph_input.tensor].type
            spec = self.made[graph_input.tensor]
            yield InputPlan(
                graph_input.path,
                graph_input.role,
                spec,
                kind.shape,
                kind.bytes // num_shards(spec, sizes),
                graph_input.memory,
            )


@lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """As `dtype.name`, which numpy spells out anew each time."""
    return dtype.name


def cheapest_copies(
    made: Spec,
    needed: Iterable[Spec],
    relay: Spec | None,
    tensor_bytes: int,
    resharder: Resharder,
) -> tuple[Conversion, ...]:
    """The cheapest way to make all `needed` specs of a tensor from the one it has.

    Copies may be made from copies: a minimum spanning arborescence rooted at `made`,
    with and without the relay's spec as one more stop (Edmonds 1967).
    """
    targets = [spec for spec in dict.fromkeys(needed) if spec != made]
    if not targets:
        return ()
    if len(targets) == 1 and relay in (None, made, targets[0]):
        return (Conversion(made, targets[0]),)
    best: tuple[float, tuple[Conversion, ...]] | None = None
    stops = [targets]
    if relay is not None and relay != made and relay not in targets:
        stops.append([relay, *targets])
    for nodes in stops:
        graph = networkx.DiGraph()
        for source in [made, *nodes]:
            for target in nodes:
                if source != target:
                    fixed, per_byte = resharder.seconds(source, target)
                    seconds = fixed + per_byte * tensor_bytes
                    graph.add_edge(source, target, weight=seconds)
        tree = networkx.minimum_spanning_arborescence(graph)
        cost = sum(data["weight"] for _, _, data in tree.edges(data=True))
        order = networkx.bfs_edges(tree, made)
        if best is None or cost < best[0]:
            best = (cost, tuple(Conversion(s, t) for s, t in order))
    assert best is not None
    return best[1]


def _collectives(
    graph: OpGraph,
    tensors: Sequence[TensorPlan],
    resharder: Resharder,
) -> tuple[tuple[Collective, ...], float]:
    """Every collective of a step, and the seconds that it waits for them."""
    found, seconds = [], 0.0
    visible = visible_fractions(graph, resharder.cluster)
    maker = {t: op for op in graph.operators() for t in op.results}
    for index, tensor in enumerate(tensors):
        kind, block = graph.tensors[index].type, graph.blocks[tensor.block]
        for conversion in tensor.conversions:
            fixed, per_byte = resharder.seconds(conversion.source, conversion.target)
            waited = block.weight * visible[index]
            seconds += (fixed + per_byte * kind.bytes) * waited
            for step in resharder.steps(conversion.source, conversion.target):
                if not step.is_collective:
                    continue
                reduces = step.kind in ("all_reduce", "reduce_scatter")
                dtype = wire_dtype(step, kind.dtype)
                whole_bytes = kind.size * dtype.itemsize
                source = maker[index].source if index in maker else ""
                found.append(
                    Collective(
                        step.kind,
                        resharder.groups(step),
                        dtype.name,
                        round(whole_bytes * step.fraction),
                        block.trip_count,
                        _REDUCTION_NAMES[step.reduction] if reduces else "",
                        f"{tensor.name} {source}".strip(),
                        conditional=block.conditional,
                        unbounded=block.unbounded,
                    )
                )
    for op in graph.operators():
        if op.kind == SHARD_MAP:
            block = graph.blocks[op.block]
            for collective, link_seconds in shard_map_collectives(op, block, resharder):
                found.append(collective)
                seconds += link_seconds * block.weight / block.trip_count
    return tuple(found), seconds


def shard_map_collectives(
    op: Operator, block: Block, resharder: Resharder
) -> Iterator[tuple[Collective, float]]:
    """What a user's shard_map says itself, with the seconds of all its executions."""
    around = Surroundings(block.trip_count, block.conditional, block.unbounded)
    mesh, cluster = resharder.mesh, resharder.cluster
    for collective, axes in body_collectives(op, mesh, around):
        links = [cluster.link(mesh, axes)]
        kind = collective.kind
        priced = kind if kind in COLLECTIVE_KINDS else "collective_permute"
        seconds = collective_seconds(priced, collective.bytes, links)
        yield collective, seconds * collective.count


def _split_fraction(
    graph: OpGraph, operators: Sequence[OperatorPlan], mesh: MeshShape
) -> float:
    """The part of the heavy flops that no two devices do twice."""
    heavy = whole = 0.0
    for op, plan in zip(graph.operators(), operators, strict=True):
        if op.kind not in STRUCTURED and is_heavy_operator(op):
            heavy += plan.flops
            whole += plan.flops if plan.split == mesh.size else 0.0
    return whole / heavy if heavy else 1.0


def warn_fallbacks(graph: OpGraph) -> None:
    """Warn once for each source line that uses a primitive without a rule."""
    seen = set()
    for op in graph.operators():
        if op.kind in STRUCTURED or rule_of(op) is not None:
            continue
        moved = sum(kind.bytes for kind in op.operand_types if not kind.is_extended)
        if (op.kind, op.source) not in seen and moved > 1024:
            seen.add((op.kind, op.source))
            warn_fallback(op, moved)
