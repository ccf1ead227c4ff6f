"""Choose how every operator is split: build the problem, solve it, read the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.assignment import Assignment
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..costs.collectives import collective_seconds, priced_kind
from ..costs.host_memory import host_seconds
from ..costs.memory import MemoryProfile, memory_profile
from ..costs.resharding import Resharder, wire_dtype
from ..costs.user_shard_map import body_collectives
from ..graph.build_graph import SHARD_MAP, STRUCTURED
from ..graph.garbage import without_garbage_collection
from ..graph.op_graph import Block, Operator, OpGraph, TensorType
from ..graph.pins import Pin
from ..plans.plan import Conversion, Prediction, ShardingPlan
from ..plans.plan_columns import Collectives, OperatorPlans, TensorPlans, bytes_in
from ..rules.base import rule_of, warn_fallback
from ..sharding.collective import Collective, Surroundings
from ..sharding.mesh import MeshShape
from ..sharding.spec import MAX, MIN, SUM
from .divided_work import split_fraction
from .halo_costs import halo_collectives
from .plan_reader import PlanReader
from .restrict import Limit, demanded_orders, restrict
from .sharding_problem import ShardingProblem, build_problem

_REDUCTION_NAMES = {SUM: "sum", MAX: "max", MIN: "min"}


@dataclass(frozen=True)
class IntraOpSolution:
    """The plan, and the solver's account of how it was found.

    `is_searched`: memory bound, so the plan was searched for within a budget.
    """

    plan: ShardingPlan
    assignment: Assignment
    is_searched: bool = False


def plan_intra_op(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
    gap: float = 1e-4,
    cutoff: float = math.inf,
) -> IntraOpSolution:
    """The cheapest sharding plan of `graph` on `mesh`, with its bound.

    `pins` are those of arguments, by tensor, and `restrictions` what a method leaves to
    the solver, on this mesh. `gap` is the relative distance from the
    bound at which the solver stops; it stops, too, with any plan, where the bound is at
    least `cutoff` seconds.
    """
    resharder = Resharder(mesh, cluster)
    place = graph, mesh, cluster, resharder
    with without_garbage_collection():
        problem = build_problem(*place, pins, demanded=demanded_orders(restrictions))
        problem = restrict(problem, restrictions, cluster)
        assignment = solve(problem.choice_graph, gap=gap, cutoff=cutoff)
        plan = read_plan(problem, assignment, cluster, resharder)
    return IntraOpSolution(plan, assignment)


def read_plan(
    problem: ShardingProblem,
    assignment: Assignment,
    cluster: Cluster,
    resharder: Resharder,
) -> ShardingPlan:
    """The plan that an assignment of the problem stands for."""
    return read_profile(problem, assignment, cluster, resharder).plan


@without_garbage_collection()
def read_profile(
    problem: ShardingProblem,
    assignment: Assignment,
    cluster: Cluster,
    resharder: Resharder,
) -> MemoryProfile:
    """The plan that an assignment of the problem stands for, and its memory."""
    graph, mesh = problem.graph, problem.mesh
    reader = PlanReader(problem, assignment.choices, resharder)
    tensors, operators = reader.tensor_plans(), reader.operator_plans()
    trips = tuple(block.trip_count for block in graph.blocks)
    collectives, collective_seconds = _collectives(
        *(graph, tensors, operators, resharder, problem.visible)
    )
    compute_seconds = operators.seconds
    inputs = reader.input_plans()
    moving_seconds = host_seconds(graph.inputs, inputs, cluster)
    plan = ShardingPlan(
        function=graph.name,
        mesh=mesh,
        cluster=cluster.name,
        device_kind=cluster.device.kind,
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
            collective_bytes=collectives.total_bytes,
            peak_bytes=0,
            bubble_fraction=0.0,
            optimality_gap=float(assignment.gap),
            split_flops_fraction=split_fraction(graph, operators, mesh),
            host_seconds=moving_seconds,
            host_bytes=bytes_in(inputs, "host"),
        ),
    )
    profile = memory_profile(graph, plan)
    predicted = replace(plan.predicted, peak_bytes=profile.peak_bytes)
    return replace(profile, plan=replace(plan, predicted=predicted))


def _collectives(
    graph: OpGraph,
    tensors: TensorPlans,
    operators: OperatorPlans,
    resharder: Resharder,
    visible: np.ndarray,
) -> tuple[Collectives, float]:
    """Every collective of a step, and the seconds that it waits for them."""
    index = np.array(sorted(tensors.copies), np.intp)
    columns, others = graph.columns, list[Collective]()
    weights = np.array([block.weight for block in graph.blocks])
    times = weights[columns.block_of_tensors[index]] * visible[index]
    type_of = columns.type_of[index].tolist()
    sent: dict[tuple[Conversion, int], tuple[float, range]] = {}
    kinds: list[Collective] = []  # of each conversion of a type together
    seconds, steps_of, tensor_of = 0.0, list[int](), list[int]()
    pairs = zip(index.tolist(), type_of, times.tolist(), strict=True)
    for tensor, kind, own in pairs:
        for copy in tensors.copies[tensor]:
            if (copy, kind) not in sent:
                each, found = _sent(copy, columns.types[kind], resharder)
                places = range(len(kinds), len(kinds) + len(found))
                sent[copy, kind] = each, places
                kinds += found
            each, places = sent[copy, kind]
            seconds += each * own
            steps_of += places
            tensor_of += [tensor] * len(places)
    mesh, cluster = resharder.mesh, resharder.cluster
    for collective, halo in halo_collectives(graph, operators, mesh, cluster):
        others.append(collective)
        seconds += halo
    is_shard_map = columns.where(lambda op: op.kind == SHARD_MAP)
    for row in np.flatnonzero(is_shard_map).tolist():
        op = columns.operators[row]
        block = graph.blocks[op.block]
        for collective, link_seconds in shard_map_collectives(op, block, resharder):
            others.append(collective)
            seconds += link_seconds * block.weight / block.trip_count
    ends = np.array(steps_of, np.intp), np.array(tensor_of, np.intp)
    return Collectives(graph, kinds, *ends, others), seconds


def _sent(
    conversion: Conversion, kind: TensorType, resharder: Resharder
) -> tuple[float, list[Collective]]:
    """The seconds of a conversion, and its collectives."""
    pair = conversion.source, conversion.target
    found: list[Collective] = []
    for step in resharder.steps(*pair):
        if step.is_collective:
            reduces = step.kind in ("all_reduce", "reduce_scatter")
            dtype = wire_dtype(step, kind.dtype)
            found.append(
                Collective(
                    step.kind,
                    resharder.groups(step),
                    dtype.name,
                    round(kind.size * dtype.itemsize * step.fraction),
                    reduction=_REDUCTION_NAMES[step.reduction] if reduces else "",
                )
            )
    return resharder.seconds(*pair, kind.bytes), found


def shard_map_collectives(
    op: Operator, block: Block, resharder: Resharder
) -> Iterator[tuple[Collective, float]]:
    """What a user's shard_map says itself, with the seconds of all its executions."""
    around = Surroundings(block.trip_count, block.conditional, block.unbounded)
    mesh, cluster = resharder.mesh, resharder.cluster
    for collective, axes in body_collectives(op, mesh, around):
        sent = priced_kind(collective.kind), collective.bytes
        seconds = collective_seconds(*sent, cluster.link(mesh, axes))
        yield collective, seconds * collective.count


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
