"""The memory of a step shared out evenly: a guess at what its plans can hold.

Every value is there once, as on one device, and nothing is gathered. It is found in a
fraction of a second, as there is nothing to choose.
"""

from __future__ import annotations

from ..costs.memory import MemoryProfile, memory_profile
from ..graph.op_graph import OpGraph
from ..plans.plan import (
    InputPlan,
    OperatorPlan,
    Prediction,
    ShardingPlan,
    TensorPlan,
)
from ..sharding.mesh import MeshShape
from ..sharding.spec import replicated

_ONE_DEVICE = MeshShape(("x",), (1,))


def even_share_bytes(graph: OpGraph, num_devices: int) -> int:
    """Bytes that each of `num_devices` devices holds of a step at its peak."""
    return memory_on_one_device(graph).peak_bytes // num_devices


def memory_on_one_device(graph: OpGraph) -> MemoryProfile:
    """The memory of a step that is not split."""
    return memory_profile(graph, _plan_on_one_device(graph))


def _plan_on_one_device(graph: OpGraph) -> ShardingPlan:
    whole = replicated(1)
    types = [graph.tensors[each.tensor].type for each in graph.inputs]
    return ShardingPlan(
        function=graph.name,
        mesh=_ONE_DEVICE,
        cluster="",
        inputs=tuple(
            InputPlan(each.path, each.role, whole, kind.shape, kind.bytes, each.memory)
            for each, kind in zip(graph.inputs, types, strict=True)
        ),
        operators=tuple(
            OperatorPlan(
                *(op.name, op.kind, op.source, ()),
                *((whole,) * len(op.operands), (whole,) * len(op.results)),
                *(0.0, 1, 0.0),
            )
            for op in graph.operators()
        ),
        tensors=tuple(
            TensorPlan(t.name, t.type.shape, str(t.type.dtype), t.block, whole)
            for t in graph.tensors
        ),
        outputs=tuple((whole,) * len(block.outputs) for block in graph.blocks),
        trip_counts=tuple(block.trip_count for block in graph.blocks),
        collectives=(),
        predicted=Prediction(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0),
    )
