"""Why a step cannot be cut into stages: the values that would have to be together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph


def torn_backward(
    graph: OpGraph,
    op: Operator,
    sources: Iterable[int],
    available: Mapping[int, Iterable[int]],
    cotangent: Mapping[int, int],
    num_stages: int,
) -> NotImplementedError:
    """No stage has all that a backward operator reads: its `sources` lie apart.

    `available` are the stages of values, `cotangent` the one that makes a cotangent,
    which may be read there and below.
    """
    readable = {
        t: range(cotangent[t] + 1) if t in cotangent else sorted(available[t])
        for t in sources
    }
    low = min(readable, key=lambda t: max(readable[t], default=-1))
    high = max(readable, key=lambda t: min(readable[t], default=-1))
    fewer = "PipelineParallel(num_stages=2) may do; if not, " if num_stages > 2 else ""
    return NotImplementedError(
        f"Backward work goes from the last stage to the first, each operator on a "
        f"stage that has all it reads, but in a cut into {num_stages} stages "
        f"{op.name!r} at {op.source or 'an unknown line'} reads "
        f"{_at(graph, low, readable)} and {_at(graph, high, readable)}, as derivatives "
        f"of derivatives and passes behind an update do; {fewer}use "
        f"autopar.ShardParallel(), which takes num_microbatches and "
        f"microbatch_semantics as well. Two passes with an update between them can be "
        f"two steps."
    )


def _at(graph: OpGraph, tensor: int, readable: Mapping[int, Sequence[int]]) -> str:
    stages = readable[tensor]
    where = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages)) or 'none'}"
    return f"{graph.tensors[tensor].name} ({where})"


def torn_update(
    graph: OpGraph, small: Iterable[int], ends: tuple[int, int], stages: tuple[int, int]
) -> NotImplementedError:
    """The update joins the arrays `ends` of two `stages`: by what, and where.

    `small` are the tensors that may cross stages.
    """
    apart, links = set(small), networkx.Graph()
    for op in graph.blocks[0].operators:
        for tensor in {*tensors_of(op.operands), *op.results} - apart:
            links.add_edge(("tensor", tensor), ("operator", op.index))
    for each in graph.inputs:
        after = None if each.output is None else graph.outputs[each.output]
        if isinstance(after, int) and not {after, each.tensor} & apart:
            links.add_edge(("tensor", each.tensor), ("tensor", after))
    source, target = (("tensor", tensor) for tensor in ends)
    path = networkx.shortest_path(links, source, target)
    shared = min(
        (graph.tensors[index] for kind, index in path if kind == "tensor"),
        key=lambda tensor: tensor.type.bytes,
    )
    names = [graph.tensors[tensor].name for tensor in ends]
    return NotImplementedError(
        f"Each stage updates its own arrays, and only scalars cross, but {names[0]} of "
        f"stage {stages[0]} and {names[1]} of stage {stages[1]} meet in the update "
        f"through {shared.name}, {shared.type}. Make what they share a scalar (for an "
        f"ensemble, jax.vmap the gradients alone and have one optimizer for all "
        f"members), or use autopar.ShardParallel()."
    )
