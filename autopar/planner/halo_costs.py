"""What an operator whose windows overlap its shards sends, and the seconds of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ..clusters.cluster import Cluster
from ..costs.collectives import affine
from ..graph.op_graph import Operator, OpGraph
from ..plans.plan import OperatorPlan
from ..rules.base import Factor
from ..rules.halos import exchanges, factors_with_halos
from ..sharding.collective import Collective
from ..sharding.mesh import MeshShape


def halo_seconds(
    op: Operator, factors: Sequence[Factor], mesh: MeshShape, cluster: Cluster
) -> float:
    """Seconds of all exchanges of one execution, one after the other."""
    if not any(factor.halos for factor in factors):
        return 0.0
    seconds = 0.0
    for each in exchanges(op, factors, mesh.axis_sizes):
        fixed, per_byte = _affine(cluster, mesh, each.axes)
        seconds += fixed + per_byte * each.bytes
    return seconds


def halo_collectives(
    graph: OpGraph, plans: Sequence[OperatorPlan], mesh: MeshShape, cluster: Cluster
) -> Iterator[tuple[Collective, float]]:
    """Every exchange of a step, with the seconds of all its executions."""
    for op, planned in zip(graph.operators(), plans, strict=True):
        block = graph.blocks[op.block]
        factors = factors_with_halos(op, planned.factors)
        if not factors:
            continue
        for each in exchanges(op, factors, mesh.axis_sizes):
            fixed, per_byte = _affine(cluster, mesh, each.axes)
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
            yield collective, (fixed + per_byte * each.bytes) * block.weight


@lru_cache(maxsize=256)
def _affine(
    cluster: Cluster, mesh: MeshShape, axes: tuple[int, ...]
) -> tuple[float, float]:
    names = [mesh.axis_names[axis] for axis in axes]
    return affine("collective_permute", [cluster.link(mesh, names)])
