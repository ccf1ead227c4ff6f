"""What of communication a step waits for: the rest runs behind its computation.

Gradients are reduced while earlier layers are still at their backward pass, parameters
are gathered before their layer begins. Of these the cluster says what part stays
visible (`Cluster.visible_fraction`). All else (activations, their cotangents) is waited
for in full: what comes next reads it.
"""

from __future__ import annotations

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..methods.state_flow import leads_to, made_of
from .strategies import is_heavy_operator


def visible_fractions(graph: OpGraph, cluster: Cluster) -> tuple[float, ...]:
    """The part of the seconds of moving each tensor that a step waits for.

    `Cluster.visible_fraction` for parameters (what is made of state and no example) and
    gradients (what the next state is made of, and no product reads any more, not even
    in the next turn of a loop); 1 for other tensors.
    """
    if cluster.visible_fraction == 1.0:
        return (1.0,) * len(graph.tensors)
    hidden = _parameters(graph) | _gradients(graph)
    return tuple(
        cluster.visible_fraction if tensor.index in hidden else 1.0
        for tensor in graph.tensors
    )


def _parameters(graph: OpGraph) -> set[int]:
    state = [i.tensor for i in graph.inputs if i.role == "state"]
    others = [i.tensor for i in graph.inputs if i.role in ("batch", "other")]
    return made_of(graph, state) - made_of(graph, others)


def _gradients(graph: OpGraph) -> set[int]:
    products = (op for op in graph.operators() if is_heavy_operator(op))
    read = (o for op in products for o in op.operands if isinstance(o, int))
    new_state = (graph.outputs[i.output] for i in graph.inputs if i.output is not None)
    ends = (operand for operand in new_state if isinstance(operand, int))
    return leads_to(graph, ends) - leads_to(graph, read)
