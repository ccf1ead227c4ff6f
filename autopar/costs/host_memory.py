"""What it costs to keep state in the host's memory: it comes and goes over one link."""

from __future__ import annotations

from collections.abc import Sequence

from ..clusters.cluster import Cluster
from ..graph.op_graph import GraphInput
from ..plans.plan import InputPlan


def host_seconds_per_byte(graph_input: GraphInput, cluster: Cluster) -> float:
    """Seconds a step for each byte that a device has of an argument; 0 if at home."""
    if graph_input.memory == "device":
        return 0.0
    directions = 1 if graph_input.output is None else 2
    return directions / cluster.device.host_memory_bandwidth


def host_seconds(
    graph_inputs: tuple[GraphInput, ...], planned: Sequence[InputPlan], cluster: Cluster
) -> float:
    """Seconds of a step in which one device waits for its host's memory.

    All of it: that transfers hide behind work is not counted on.
    """
    seconds = (
        planned[k].bytes * host_seconds_per_byte(each, cluster)
        for k, each in enumerate(graph_inputs)
        if each.memory == "host"
    )
    return sum(seconds, 0.0)
