"""What a plan costs with other constants than those it was chosen by."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.clusters.cluster import Cluster
from autopar.costs.compute import total_flops
from autopar.costs.resharding import Resharder
from autopar.costs.scan_outputs import stacking_seconds
from autopar.costs.user_shard_map import body_work
from autopar.graph.build_graph import SHARD_MAP, STRUCTURED
from autopar.graph.op_graph import Operator, OpGraph, TensorType
from autopar.planner.halo_costs import halo_collectives, work_seconds
from autopar.planner.intra_op import shard_map_collectives
from autopar.planner.overlap import visible_fractions
from autopar.planner.strategies import SLICING
from autopar.plans.plan import OperatorPlan, ShardingPlan
from autopar.rules.halos import factors_with_halos, moved_bytes
from autopar.sharding.spec import Spec, num_shards


def plan_seconds(graph: OpGraph, plan: ShardingPlan, cluster: Cluster) -> float:
    """Seconds of a step under a plan, by the constants of a cluster.

    With the cluster that the plan was made for it is the plan's own prediction.

    Args:
      graph: the step that the plan is of.
      plan: its plan.
      cluster: has as many devices as the plan's mesh, or more.
    """
    resharder = Resharder(plan.mesh, cluster)
    visible = visible_fractions(graph, cluster).tolist()
    seconds = 0.0
    for op, planned in zip(graph.operators(), plan.operators, strict=True):
        weight = graph.blocks[op.block].weight
        seconds += (
            _operator_seconds(op, planned, plan.mesh.axis_sizes, cluster) * weight
        )
        if op.kind == SHARD_MAP:
            block = graph.blocks[op.block]
            for _, each in shard_map_collectives(op, block, resharder):
                seconds += each * weight / block.trip_count
    for _, each in halo_collectives(graph, plan.operators, plan.mesh, cluster):
        seconds += each
    for index, tensor in enumerate(plan.tensors):
        num_bytes = graph.tensors[index].type.bytes
        for copy in tensor.conversions:
            sent = resharder.seconds(copy.source, copy.target, num_bytes)
            weight = graph.blocks[tensor.block].weight * visible[index]
            seconds += sent * weight
    return seconds


def _operator_seconds(
    op: Operator, planned: OperatorPlan, sizes: Sequence[int], cluster: Cluster
) -> float:
    if op.kind == SHARD_MAP:
        return body_work(op, cluster)[1]
    if op.kind in STRUCTURED:
        return stacking_seconds(op, planned.result_specs, sizes, cluster)
    skipped = op.kind in SLICING  # only what is taken out of the first is read
    moved = _local_bytes(
        op.operand_types[skipped:], planned.operand_specs[skipped:], sizes
    )
    moved += _local_bytes(op.result_types, planned.result_specs, sizes)
    halos = factors_with_halos(op, planned.factors)
    moved += moved_bytes(op, halos, sizes)
    work = total_flops(op) / planned.split, moved
    return work_seconds(op, halos, work, sizes, cluster)


def _local_bytes(
    types: Sequence[TensorType], specs: Sequence[Spec], sizes: Sequence[int]
) -> float:
    shards = [num_shards(spec, tuple(sizes)) for spec in specs]
    return sum(t.bytes / n for t, n in zip(types, shards, strict=True))
