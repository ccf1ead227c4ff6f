"""What the arguments of a step take of a device at least, as a method has them lie."""

from __future__ import annotations

import math

from ..graph.op_graph import OpGraph
from ..methods.restrictions import NOT_SPLIT, Restriction
from ..sharding.mesh import MeshShape


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
