"""What it takes a loop to stack what its iterations make."""

from __future__ import annotations

from collections.abc import Sequence

from ..clusters.cluster import Cluster
from ..graph.build_graph import SCAN
from ..graph.op_graph import Operator
from ..sharding.spec import Spec, num_shards
from .compute import FUSED_FRACTION


def stack_seconds_per_byte(cluster: Cluster) -> float:
    """Seconds for each byte that a device adds to a stack: it is read and written.

    Elementwise operators write into the stack at once, so it is charged as they are.
    """
    return 2.0 * FUSED_FRACTION / cluster.device.bytes_per_second


def stacking_seconds(
    op: Operator, result_specs: Sequence[Spec], sizes: Sequence[int], cluster: Cluster
) -> float:
    """Seconds in which one execution of a scan stacks its results; 0 for all else."""
    if op.kind != SCAN:
        return 0.0
    first = op.params["num_carry"]
    stacked = zip(op.result_types[first:], result_specs[first:], strict=True)
    held = sum(kind.bytes / num_shards(spec, sizes) for kind, spec in stacked)
    return held * stack_seconds_per_byte(cluster)
