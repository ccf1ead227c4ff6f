"""What of communication a step waits for: the rest runs behind its computation.

Gradients are reduced while earlier layers are still at their backward pass, parameters
are gathered before their layer begins. Of these the cluster says what part stays
visible (`Cluster.visible_fraction`). All else (activations, their cotangents) is waited
for in full: what comes next reads it.
"""

from __future__ import annotations

import numpy as np

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..graph.work import is_heavy_operator
from ..sharding.state_flow import Flow


def visible_fractions(graph: OpGraph, cluster: Cluster) -> np.ndarray:
    """[tensors] the part of the seconds of moving each that a step waits for.

    `Cluster.visible_fraction` for parameters (what is made of state and no example) and
    gradients (what the next state is made of, and no product reads any more, not even
    in the next turn of a loop); 1 for other tensors.
    """
    found = np.ones(len(graph.tensors))
    if cluster.visible_fraction < 1.0:
        flow = Flow(graph)
        hidden = _parameters(graph, flow) | _gradients(graph, flow)
        found[list(hidden)] = cluster.visible_fraction
    return found


def _parameters(graph: OpGraph, flow: Flow) -> set[int]:
    """The tensors that are made of state and no example."""
    state = [each.tensor for each in graph.inputs if each.role == "state"]
    others = [i.tensor for i in graph.inputs if i.role in ("batch", "other")]
    return flow.made_of(state) - flow.made_of(others)


def _gradients(graph: OpGraph, flow: Flow) -> set[int]:
    """The tensors that the next state is made of, and no product reads any more."""
    outputs = [i.output for i in graph.inputs if i.output is not None]
    new = [t for t in map(graph.outputs.__getitem__, outputs) if isinstance(t, int)]
    columns = graph.columns
    is_product = columns.where(is_heavy_operator)
    read = columns.operands[is_product[columns.rows_of_operands]]
    products = flow.makers_of(read[read >= 0].tolist(), around_loops=True)
    return flow.makers_of(new, around_loops=True) - products
