"""What the arguments of a step take of a device at least, as a method has them lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..costs.memory import memory_profile
from ..graph.op_graph import OpGraph
from ..methods.restrictions import NOT_SPLIT, Limit, Restriction
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from .memory_users import no_room_error


def check_room(
    graph: OpGraph, free: ShardingPlan, limits: Sequence[Limit], budget_bytes: int
) -> None:
    """Refuses limits with which the arguments alone are above a budget.

    `free` is the cheapest plan that they leave.

    Raises:
      InfeasiblePlanError: they are.
    """
    methods = [each for each in limits if isinstance(each, Restriction)]
    needed = [least_input_bytes(graph, free.mesh, each) for each in methods]
    if max(needed, default=0.0) > budget_bytes:
        profile = memory_profile(graph, free)
        raise no_room_error(profile, budget_bytes, int(max(needed)))


def least_input_bytes(
    graph: OpGraph, mesh: MeshShape, restriction: Restriction
) -> float:
    """Bytes a device of all arguments, each split as often as the restriction lets it.

    No plan that meets the restriction holds less, as all of them are there when the
    step begins. Arguments in the host's memory do not count.
    """
    demands = {**restriction.everywhere, **restriction.homes}
    least = 0.0
    for given in graph.inputs:
        demand = demands.get(given.tensor)
        states = demand or (None,) * mesh.num_axes
        free = (
            size
            for size, allowed in zip(mesh.axis_sizes, states, strict=True)
            if allowed is None or not allowed <= NOT_SPLIT
        )
        if given.memory == "device":
            least += graph.tensors[given.tensor].type.bytes / math.prod(free)
    return least
