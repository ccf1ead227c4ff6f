"""What a layer costs on a submesh, and what of it is the same for every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds
from ..graph.op_graph import Operator, OpGraph, TensorType
from ..planner.strategies import SLICING, tensor_specs, total_flops
from ..plans.plan import ShardingPlan
from ..sharding.resharding import Resharder
from ..sharding.spec import SUM, Spec, is_pending, num_shards


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes on one device of a submesh.

    `seconds` are of a microbatch, forward and backward, `once_seconds` of the update;
    of these, `reducing_seconds` are what it takes to add up the parts of sums.
    `state_bytes` are parameters and what the optimizer keeps, `gradient_bytes` their
    sums, `microbatch_bytes` what backward waits for; `working_bytes` come and go.

    Ideals say more: of `seconds`, `forward_seconds` are forward and `weight_seconds`
    what no other layer waits for, which `handed_bytes` wait with.
    """

    seconds: float = 0.0
    once_seconds: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    microbatch_bytes: float = 0.0
    working_bytes: float = 0.0
    reducing_seconds: float = 0.0
    forward_seconds: float = 0.0
    weight_seconds: float = 0.0
    handed_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """Operators that are alike: what one of them does, and how often it runs."""

    kind: str
    flops: float
    bytes: float
    dtype: Any
    times: float

    def seconds(self, share: float, cluster: Cluster) -> float:
        """If a device does a share of each, and nothing is sent."""
        one = self.kind, self.flops * share, self.bytes * share, self.dtype
        return self.times * operator_seconds(*one, cluster)


def summed_work(operators: Iterable[tuple[Operator, float]]) -> list[Work]:
    """The work of operators without bodies, with how often each runs."""
    times: Counter[tuple[str, float, float, Any]] = Counter()
    for op, number in operators:
        read = op.operand_types[op.kind in SLICING :]
        num_bytes = sum(kind.bytes for kind in (*read, *op.result_types))
        dtypes = [kind.dtype for kind in op.operand_types if not kind.is_extended]
        dtype = dtypes[0] if dtypes else "float32"
        key = op.kind, total_flops(op), float(num_bytes), dtype
        times[key] = times[key] + number  # type: ignore[assignment]
    return [Work(*key, number) for key, number in times.items()]


def reduced_sums(
    plan: ShardingPlan, graph: OpGraph, resharder: Resharder
) -> tuple[float, dict[str, float]]:
    """Seconds in which the update adds up the parts of sums; then a device's bytes.

    The bytes are of every input, by slot.
    """
    seconds, held = 0.0, {each.path: float(each.bytes) for each in plan.inputs}
    for each, own in zip(plan.inputs, graph.inputs, strict=True):
        if is_pending(each.spec):
            kind = graph.tensors[own.tensor].type
            least, number = _reduced(kind, each.spec, resharder)
            seconds, held[each.path] = seconds + least, kind.bytes / number
    return seconds, held


def most_reducing_seconds(sums: Iterable[TensorType], resharder: Resharder) -> float:
    """Seconds in which the update adds up sums that come as parts of all devices."""
    parts = (SUM,) * resharder.mesh.num_axes
    return sum(_reduced(kind, parts, resharder)[0] for kind in sums)


def _reduced(kind: TensorType, spec: Spec, resharder: Resharder) -> tuple[float, int]:
    """The least seconds for what a spec owes, and how many devices share the sum."""
    costs: list[tuple[float, int]] = []
    for target in tensor_specs(kind, resharder.mesh, pending=False):
        seconds = resharder.seconds(spec, target, kind.bytes)
        number = num_shards(target, resharder.mesh.axis_sizes)
        costs.append((seconds, number))
    return min(costs)
