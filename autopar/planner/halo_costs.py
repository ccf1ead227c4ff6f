"""What an operator sends while it runs, and the seconds of it.

Windows that overlap their shards exchange halos first. Where attention goes around a
ring, each transfer runs beside the work on the part before; of what fits behind it a
step still waits for `Cluster.visible_fraction`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from ..clusters.cluster import Cluster
from ..costs.collectives import AxisLink, collective_seconds
from ..costs.compute import flops, operator_seconds
from ..graph.op_graph import Operator, OpGraph
from ..plans.plan import OperatorPlan
from ..rules.base import Factor
from ..rules.halos import (
    Exchange,
    Traffic,
    exchanges,
    factors_with_halos,
    rows_with_halos,
    traffic_of,
)
from ..sharding.collective import Collective
from ..sharding.mesh import MeshShape


def halo_seconds(
    op: Operator, factors: Sequence[Factor], mesh: MeshShape, cluster: Cluster
) -> float:
    """Seconds that one execution waits for all its exchanges, one after the other."""
    return sum(seconds for _, seconds in _waits(op, factors, mesh, cluster))


def work_seconds(
    op: Operator,
    factors: Sequence[Factor],
    work: tuple[float, float],
    sizes: Sequence[int],
    cluster: Cluster,
) -> float:
    """Seconds of one execution, given one device's flops and all bytes that it moves.

    What is several kernels takes their time to start, those of each part anew.
    """
    num_flops, num_bytes = work
    dtype = next((t.dtype for t in op.operand_types if not t.is_extended), "float32")
    seconds = operator_seconds(op.kind, num_flops, num_bytes, dtype, cluster)
    own = traffic_of(op, factors, sizes)
    return seconds + (own.num_kernels - 1 if own else 0) * cluster.kernel_seconds


def _waits(
    op: Operator, factors: Sequence[Factor], mesh: MeshShape, cluster: Cluster
) -> Iterator[tuple[Exchange, float]]:
    """Every exchange of one execution, with the seconds that it is waited for."""
    sizes = mesh.axis_sizes
    own = traffic_of(op, factors, sizes)
    if own is not None:
        yield from _waits_beside_parts(own, op, factors, mesh, cluster)
    if any(factor.halos for factor in factors):
        for each in exchanges(op, factors, sizes):
            yield each, _seconds(each, mesh, cluster)


def _waits_beside_parts(
    own: Traffic,
    op: Operator,
    factors: Sequence[Factor],
    mesh: MeshShape,
    cluster: Cluster,
) -> Iterator[tuple[Exchange, float]]:
    """Exchanges that run beside all parts of an operator's work but one."""
    if not own.exchanges:
        return
    split = prod(
        size
        for size, factor in zip(mesh.axis_sizes, factors, strict=True)
        if factor.splits
    )
    operands, results = (
        [kind.shape for kind in types] for types in (op.operand_types, op.result_types)
    )
    num_flops = flops(op.kind, op.params, operands, results) / split
    moved = num_flops, float(own.moved_bytes)
    work = work_seconds(op, factors, moved, mesh.axis_sizes, cluster)
    behind = work / own.num_parts * (own.num_parts - 1) / len(own.exchanges)
    for each in own.exchanges:
        yield each, _seconds(each, mesh, cluster, behind)


def halo_collectives(
    graph: OpGraph, plans: Sequence[OperatorPlan], mesh: MeshShape, cluster: Cluster
) -> Iterator[tuple[Collective, float]]:
    """Every exchange of a step, with the seconds of all its executions."""
    for row in rows_with_halos(graph, [op.factors for op in plans]):
        op = graph.operators()[row]
        block = graph.blocks[op.block]
        factors = factors_with_halos(op, plans[row].factors)
        for each, seconds in _waits(op, factors, mesh, cluster):
            collective = Collective(
                "collective_permute",
                each.pairs(mesh),
                each.dtype,
                each.bytes,
                block.trip_count,
                source=f"{op.name} {op.source}".strip(),
                conditional=block.conditional,
                unbounded=block.unbounded,
            )
            yield collective, seconds * block.weight


def _seconds(
    each: Exchange, mesh: MeshShape, cluster: Cluster, behind: float = 0.0
) -> float:
    """How long one exchange is waited for that runs beside `behind` seconds of work."""
    link = _link(cluster, mesh, each.axes)
    seconds = collective_seconds("collective_permute", each.bytes, link)
    return seconds - min(seconds, behind) * (1 - cluster.visible_fraction)


@lru_cache(maxsize=256)
def _link(cluster: Cluster, mesh: MeshShape, axes: tuple[int, ...]) -> AxisLink:
    return cluster.link(mesh, [mesh.axis_names[axis] for axis in axes])
