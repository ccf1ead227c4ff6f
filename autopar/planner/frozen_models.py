"""Find arguments that share a leading size as a batch does, but hold a frozen model.

A step that only reads its model (beam search, sampling over a cache) may have no batch
at all, and weights `[d, ...]` look like examples. What tells them apart is how dim 0 is
used in forward work: a product of examples sums over their dim only with the same
examples, and a loop does not multiply them with what it carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..frontend.roles import Roles
from ..frontend.tracing import TracedFunction
from ..graph.build_graph import SCAN, build_graph
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..microbatches.microbatch_flow import Flow
from .strategies import is_heavy_operator


def frozen_models(traced: TracedFunction, roles: Roles) -> set[int]:
    """Leaves of the arguments that were taken for the batch and are weights.

    Only arguments with several matrices are looked at: the graph is built for it.
    """
    args, kwargs = jax.tree.unflatten(traced.in_tree, range(traced.in_tree.num_leaves))
    avals = traced.jaxpr.in_avals
    graph: OpGraph | None = None
    found: set[int] = set()
    for argument in (*args, *kwargs.values()):
        leaves: list[int] = jax.tree.leaves(argument)
        matrices = [
            leaf
            for leaf in leaves
            if roles.roles[leaf] == "batch"
            and avals[leaf].ndim > 1
            and jnp.issubdtype(avals[leaf].dtype, jnp.inexact)
        ]
        if len(matrices) > 1:
            graph = graph or build_graph(traced, roles)
            if has_weights(graph, [graph.inputs[leaf].tensor for leaf in matrices]):
                found.update(leaves)
    return found


def has_weights(graph: OpGraph, matrices: Sequence[int]) -> bool:
    """Whether forward work uses dim 0 of `matrices` as that of weights.

    `matrices` are inputs with one size along dim 0.
    """
    size = graph.tensors[matrices[0]].type.shape[0]
    flow = Flow(
        graph, 1, size, sums_stay_apart=False, joins_batches=False, hoisted=set()
    )
    flow.run(matrices)
    return any(
        _sums_over_weights(flow, op) or _carries_through_weights(flow, op)
        for op in graph.blocks[0].operators
        if "transpose(" not in op.name
    )


def _sums_over_weights(flow: Flow, op: Operator) -> bool:
    """Whether a product sums over the dim in one operand alone."""
    if op.kind not in ("dot_general", "conv_general_dilated"):
        return False
    left, right = (flow.state_of(operand) for operand in op.operands)
    if op.kind == "conv_general_dilated":
        return right >= 0  # of the kernel
    (of_left, of_right), _ = op.params["dimension_numbers"]
    return any(
        (left == here) != (right == there)
        for here, there in zip(of_left, of_right, strict=True)
    )


def _carries_through_weights(flow: Flow, op: Operator) -> bool:
    """Whether a loop over dim 0 multiplies what it carries with its slices."""
    if op.kind != SCAN:
        return False
    first = op.params["num_consts"]
    last = first + op.params["num_carry"]
    block = flow.graph.blocks[op.bodies[0]]
    carried = set(block.inputs[first:last])
    sliced = {
        inner
        for outer, inner in zip(op.operands[last:], block.inputs[last:], strict=True)
        if flow.state_of(outer) == 0
    }
    for inner in block.operators:
        reads = tensors_of(inner.operands)
        if is_heavy_operator(inner):
            if not (carried.isdisjoint(reads) or sliced.isdisjoint(reads)):
                return True
        for reached in (carried, sliced):
            if not reached.isdisjoint(reads):
                reached.update(inner.results)
    return False
