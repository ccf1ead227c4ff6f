"""What a device holds at least, whatever the mesh and the plan.

The memory of the step on one device, divided by their number: every value is there
once, shared out evenly, and nothing is gathered. It is found in a fraction of a second
from the graph alone, as there is nothing to choose on one device. Small parts of values
may be fused otherwise than the whole: plans of toys were met that hold a tenth less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..costs.memory import MemoryProfile, profile_of_arrays
from ..costs.plan_arrays import PlanArrays
from ..graph.op_graph import OpGraph
from ..plans.plan import InputPlan, Prediction, ShardingPlan
from ..plans.plan_columns import OperatorPlans, TensorPlans, Work
from ..sharding.mesh import MeshShape
from ..sharding.spec import replicated

OUT_OF_REACH = 1.2  # times the budget, from which on no plan is looked for
MANY_OPERATORS = 1_500  # of fewer, the plan that needs the least is found soon
_ONE_DEVICE = MeshShape(("x",), (1,))


def even_share_bytes(graph: OpGraph, num_devices: int) -> int:
    """Bytes that each of `num_devices` devices holds of a step at its peak."""
    return memory_on_one_device(graph).live_bytes // num_devices


def is_long(graph: OpGraph) -> bool:
    """Whether a step takes long to search."""
    return len(graph.operators()) >= MANY_OPERATORS


def is_out_of_reach(graph: OpGraph, num_devices: int, budget_bytes: int) -> bool:
    """Whether no plan should come near a budget, of a step that is long to search."""
    limit = OUT_OF_REACH * budget_bytes
    return is_long(graph) and even_share_bytes(graph, num_devices) > limit


def memory_on_one_device(graph: OpGraph) -> MemoryProfile:
    """The memory of a step that is not split."""
    plan = _plan_on_one_device(graph)
    made = np.zeros(len(graph.tensors), np.intp)
    read = np.zeros(len(graph.columns.operands), np.intp)
    numbers = {replicated(1): 0}
    profile = profile_of_arrays(PlanArrays(graph, plan, numbers, made, read))
    predicted = replace(plan.predicted, peak_bytes=profile.live_bytes)
    return replace(profile, plan=replace(plan, predicted=predicted))


def _plan_on_one_device(graph: OpGraph) -> ShardingPlan:
    whole, operators = replicated(1), graph.operators()
    most = max((len(op.results) for op in operators), default=0)
    work = Work((), (), (whole,) * most, 0.0, 1, 0.0)
    numbers = np.zeros(len(operators), np.intp)
    made = np.zeros(len(graph.tensors), np.intp)
    types = [graph.tensors[each.tensor].type for each in graph.inputs]
    return ShardingPlan(
        function=graph.name,
        mesh=_ONE_DEVICE,
        cluster="",
        inputs=tuple(
            InputPlan(each.path, each.role, whole, kind.shape, kind.bytes, each.memory)
            for each, kind in zip(graph.inputs, types, strict=True)
        ),
        operators=OperatorPlans(operators, [work], numbers),
        tensors=TensorPlans(graph, [whole], made, {}),
        outputs=tuple((whole,) * len(block.outputs) for block in graph.blocks),
        trip_counts=tuple(block.trip_count for block in graph.blocks),
        collectives=(),
        predicted=Prediction(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0),
    )
