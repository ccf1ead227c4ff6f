"""A step as it was traced, which arguments are its batch, and the step cut by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..frontend.derived_results import derived_results
from ..frontend.roles import Roles, infer_roles
from ..frontend.tracing import TracedFunction
from ..graph.build_graph import build_graph, tensor_type
from ..graph.op_graph import OpGraph
from ..microbatches.microbatch_independent import trace_microbatch
from ..microbatches.microbatch_loop import with_microbatch_loop
from ..microbatches.microbatch_semantics import microbatched
from ..options import Options
from .frozen_models import frozen_models
from .padded_trace import padded_arguments


@dataclass(frozen=True, eq=False)
class TracedWhole:
    """A step as it is traced, before it is cut into microbatches."""

    fun: Callable[..., Any]
    traced: TracedFunction
    graph: OpGraph
    roles: Roles


def in_microbatches(
    whole: TracedWhole, options: Options
) -> tuple[TracedFunction, OpGraph]:
    """A traced step in the microbatches that are asked for, and its graph.

    Raises:
      ValueError: the batch size is not divisible.
      BatchCoupledError: the step cannot be cut so.
    """
    fun, traced, graph, roles = whole.fun, whole.traced, whole.graph, whole.roles
    number, batch = options.num_microbatches, batch_tensors(traced, graph, options)
    if number == 1:
        return traced, graph
    step = microbatched(
        lambda: trace_microbatch(fun, traced, graph, batch, number),
        graph,
        roles,
        batch,
        number,
        options.microbatch_semantics,
    )
    traced = with_microbatch_loop(traced, step)
    return traced, build_graph(traced, roles)


def batch_tensors(
    traced: TracedFunction, graph: OpGraph, options: Options
) -> list[int]:
    """Graph inputs that are cut along their first dim, or what they are padded to."""
    if options.batch_argnums == "auto":
        found = [i.tensor for i in graph.inputs if i.role == "batch"]
    else:
        chosen = leaves_of(traced, options.batch_argnums, options)
        found = [graph.inputs[leaf].tensor for leaf in chosen]
    padded = padded_arguments(graph)
    return [padded.get(tensor, tensor) for tensor in found]


def roles_of(traced: TracedFunction, donated: Collection[int] = ()) -> Roles:
    """Which leaves of a traced function are state and which the batch.

    `donated` are leaves that are given away by name.
    """
    jaxpr = traced.jaxpr.jaxpr
    inputs = [tensor_type(var.aval) for var in jaxpr.invars]
    outputs = [tensor_type(var.aval) for var in jaxpr.outvars]
    trees = traced.in_tree, traced.out_tree
    weights: set[int] = set()
    known = (*trees, inputs, outputs, traced.input_paths)
    derived = derived_results(jaxpr)
    while True:
        roles = infer_roles(*known, weights, derived, donated)
        found = frozen_models(traced, roles)
        if not found:
            return roles
        weights |= found


def donated_by_name(traced: TracedFunction, options: Options) -> list[int]:
    """Leaf positions of the arguments that `donate_argnums` names."""
    named = options.donate_argnums
    return [] if named == "auto" else leaves_of(traced, named, options)


def leaves_of(
    traced: TracedFunction, argnums: Sequence[int], options: Options
) -> list[int]:
    """Leaf positions of the arguments at `argnums`, also of those given by keyword."""
    leaves = range(traced.in_tree.num_leaves)
    args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
    positions = (i for i in itertools.count() if i not in options.static_argnums)
    chosen = [each for each, i in zip(args, positions, strict=False) if i in argnums]
    names = options.names_at(argnums)
    return jax.tree.leaves([chosen, [kwargs[n] for n in names if n in kwargs]])
