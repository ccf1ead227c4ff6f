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
from ..plans.plan import Conversion, OperatorPlan, Prediction, ShardingPlan, total_bytes
from ..rules.base import rule_of, warn_fallback
from ..sharding.collective import Collective, Surroundings
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.ports import ports_of
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
    operators, inputs = reader.operator_plans(), reader.input_plans()
    trips = tuple(block.trip_count for block in graph.blocks)
    collectives, collective_seconds = _collectives(
        *(graph, reader.copies, operators, resharder, problem.visible)
    )
    compute_seconds = sum(op.seconds for op in operators)
    moving_seconds = host_seconds(graph.inputs, inputs, cluster)
    plan = ShardingPlan(
        function=graph.name,
        mesh=mesh,
        cluster=cluster.name,
        device_kind=cluster.device.kind,
        inputs=inputs,
        operators=operators,
        tensors=reader.tensor_plans(),
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
            split_flops_fraction=split_fraction(graph, operators, mesh),
            host_seconds=moving_seconds,
            host_bytes=sum(i.bytes for i in inputs if i.memory == "host"),
        ),
    )
    profile = memory_profile(graph, plan)
    predicted = replace(plan.predicted, peak_bytes=profile.peak_bytes)
    return replace(profile, plan=replace(plan, predicted=predicted))


def _collectives(
    graph: OpGraph,
    copies: Mapping[int, tuple[Conversion, ...]],
    operators: Sequence[OperatorPlan],
    resharder: Resharder,
    visible: np.ndarray,
) -> tuple[tuple[Collective, ...], float]:
    """Every collective of a step, and the seconds that it waits for them.

    `copies` are those of tensors; an argument that is an operand of a body has one
    name.
    """
    seconds, found, given = 0.0, list[Collective](), _arguments_in_bodies(graph)
    sources = {t: op.source for op in graph.operators() for t in op.results}
    # Found once for tensors of one type with the same copies, which are one object.
    known: dict[object, list[tuple[float, list[Collective]]]] = {}
    for index in sorted(copies):
        tensor = graph.tensors[index]
        key = id(copies[index]), tensor.type
        if key not in known:
            known[key] = [_sent(e, tensor.type, resharder) for e in copies[index]]
        block = graph.blocks[tensor.block]
        name = graph.tensors[given.get(index, index)].name
        source = f"{name} {sources.get(index, '')}".strip()
        where = block.trip_count, block.conditional, block.unbounded
        for each, steps in known[key]:
            seconds += each * block.weight * float(visible[index])
            found += [step.at(source, *where) for step in steps]
    mesh, cluster = resharder.mesh, resharder.cluster
    for collective, halo in halo_collectives(graph, operators, mesh, cluster):
        found.append(collective)
        seconds += halo
    for op in graph.operators():
        if op.kind == SHARD_MAP:
            block = graph.blocks[op.block]
            for each, link_seconds in shard_map_collectives(op, block, resharder):
                found.append(each)
                seconds += link_seconds * block.weight / block.trip_count
    return tuple(found), seconds


def _arguments_in_bodies(graph: OpGraph) -> dict[int, int]:
    """By operand of a body that is one of the step's arguments, which."""
    found = {each.tensor: each.tensor for each in graph.inputs}
    for op in (each for each in graph.operators() if each.bodies):
        inside = {t for body in op.bodies for t in graph.blocks[body].inputs}
        for port in ports_of(graph, op):
            sources = [tensor for tensor, _, _ in port.reads]
            if len(sources) == 1 and sources[0] in found:
                given = found[sources[0]]
                found.update({t: given for t, _ in port.writes if t in inside})
    return found


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
