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
from ..graph.state_flow import spread_marks
from ..graph.work import is_heavy_operator

_MARKS = {"state": 1, "batch": 2, "other": 2}
_NEW_STATE, _READ_BY_PRODUCT = 1, 2


def visible_fractions(graph: OpGraph, cluster: Cluster) -> np.ndarray:
    """[tensors] the part of the seconds of moving each that a step waits for.

    `Cluster.visible_fraction` for parameters (what is made of state and no example) and
    gradients (what the next state is made of, and no product reads any more, not even
    in the next turn of a loop); 1 for other tensors.
    """
    if cluster.visible_fraction == 1.0:
        return np.ones(len(graph.tensors))
    made = np.zeros(len(graph.tensors), np.uint8)
    read = np.zeros(len(graph.tensors), np.uint8)
    for each in graph.inputs:
        made[each.tensor] = _MARKS.get(each.role, 0)
        new = None if each.output is None else graph.outputs[each.output]
        if isinstance(new, int):
            read[new] = _NEW_STATE
    columns = graph.columns
    is_product = columns.where(is_heavy_operator)
    operands = columns.operands[is_product[columns.rows_of_operands]]
    read[np.unique(operands[operands >= 0])] |= _READ_BY_PRODUCT
    is_parameter = spread_marks(graph, made) == _MARKS["state"]
    is_gradient = spread_marks(graph, read, backwards=True) == _NEW_STATE
    return np.where(is_parameter | is_gradient, cluster.visible_fraction, 1.0)
