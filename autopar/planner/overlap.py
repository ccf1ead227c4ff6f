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
from ..sharding.state_flow import made_of, makers_of


def visible_fractions(graph: OpGraph, cluster: Cluster) -> np.ndarray:
    """[tensors] the part of the seconds of moving each that a step waits for.

    `Cluster.visible_fraction` for parameters (what is made of state and no example) and
    gradients (what the next state is made of, and no product reads any more, not even
    in the next turn of a loop); 1 for other tensors.
    """
    if cluster.visible_fraction == 1.0:
        return np.ones(len(graph.tensors))
    hidden = is_parameter(graph) | is_gradient(graph)
    return np.where(hidden, cluster.visible_fraction, 1.0)


def is_parameter(graph: OpGraph) -> np.ndarray:
    """bool [tensors] which are made of state and no example."""
    state = [each.tensor for each in graph.inputs if each.role == "state"]
    others = [i.tensor for i in graph.inputs if i.role in ("batch", "other")]
    return _marked(graph, made_of(graph, state) - made_of(graph, others))


def is_gradient(graph: OpGraph) -> np.ndarray:
    """bool [tensors] which the next state is made of, and no product reads any more."""
    outputs = [i.output for i in graph.inputs if i.output is not None]
    new = [t for t in map(graph.outputs.__getitem__, outputs) if isinstance(t, int)]
    columns = graph.columns
    is_product = columns.where(is_heavy_operator)
    read = columns.operands[is_product[columns.rows_of_operands]]
    made = makers_of(graph, new, around_loops=True)
    products = makers_of(graph, read[read >= 0].tolist(), around_loops=True)
    return _marked(graph, made - products)


def _marked(graph: OpGraph, tensors: set[int]) -> np.ndarray:
    found = np.zeros(len(graph.tensors), bool)
    found[list(tensors)] = True
    return found
