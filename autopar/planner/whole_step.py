"""A step as it was traced, which arguments are its batch, and the step cut by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..frontend.derived_results import derived_results
from ..frontend.roles import infer_roles
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph, tensor_type
from ..graph.op_graph import Operator, OpGraph, Role
from ..graph.traced_function import Roles, TracedFunction
from ..graph.work import holds_heavy_work
from ..microbatches.microbatch_independent import microbatched, trace_microbatch
from ..microbatches.microbatch_loop import with_microbatch_loop
from ..options import Options
from ..sharding.pins import keys_of_paths, spellings
from ..transforms.counts_apart import with_counts_apart
from ..transforms.padded_trace import padded_arguments
from ..transforms.update_loops import (
    loop_of_updates,
    named,
    slices_of,
    update_of,
    with_update,
)
from .batch_inputs import batch_by_use


@dataclass(frozen=True, eq=False)
class TracedWhole:
    """A step as it is traced, before it is cut into microbatches.

    `leaves` are those of the arguments that it was traced with.
    """

    fun: Callable[..., Any]
    leaves: Sequence[Any]
    traced: TracedFunction
    graph: OpGraph
    roles: Roles


def trace_whole(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> TracedWhole:
    """Traces `fun` on its dynamic arguments."""
    traced = trace(fun, args, kwargs)
    named = donated_by_name(traced, options), batch_by_name(traced, options)
    roles = roles_of(traced, *named)
    leaves = jax.tree.leaves((args, kwargs))
    return TracedWhole(fun, leaves, traced, build_graph(traced, roles), roles)


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
    if options.microbatch_semantics == "exact":
        traced, graph = with_counts_apart(traced, graph, roles, batch)
    loop = loop_of_updates(graph)
    try:
        step = microbatched(
            lambda: trace_microbatch(fun, traced, graph, batch, number),
            graph,
            roles,
            batch,
            number,
            options.microbatch_semantics,
        )
        inside = step.phases.loop
        if loop is None or any(holds_heavy_work(step.graph, op) for op in inside):
            traced = with_microbatch_loop(traced, step)
            return traced, build_graph(traced, roles)
    except ValueError:
        if loop is None:
            raise
    traced = _updates_in_microbatches(whole, loop, options)
    return traced, build_graph(traced, roles)


def _updates_in_microbatches(
    whole: TracedWhole, loop: Operator, options: Options
) -> TracedFunction:
    """A step of several updates, with the examples of each cut into microbatches."""
    graph = whole.graph
    update = update_of(graph, loop)
    if options.microbatch_semantics != "exact":
        raise ValueError(
            f"Independent microbatches are traced from the step, which makes several "
            f"updates in {named(loop)}; call the step once an update."
        )
    roles = roles_of(update)
    if options.batch_argnums != "auto":
        batch = batch_tensors(whole.traced, graph, options)
        slices = slices_of(graph, loop, batch)
        told: list[Role] = [
            "batch" if i in slices else "other" if role == "batch" else role
            for i, role in enumerate(roles.roles)
        ]
        roles = replace(roles, roles=tuple(told))
    own = TracedWhole(whole.fun, (), update, build_graph(update, roles), roles)
    try:
        cut, _ = in_microbatches(own, replace(options, batch_argnums="auto"))
    except ValueError as error:
        error.add_note(f"Microbatches are those of each update of {named(loop)}.")
        raise
    return with_update(whole.traced, graph, loop, cut)


def batch_tensors(
    traced: TracedFunction, graph: OpGraph, options: Options
) -> list[int]:
    """Graph inputs that are cut along their first dim, or what they are padded to.

    Of unlike sizes that nobody named, the smaller ones are left whole that the number
    of microbatches does not divide.
    """
    named, padded = batch_by_name(traced, options), padded_arguments(graph)
    if named is not None:
        tensors = [graph.inputs[leaf].tensor for leaf in named]
    else:
        tensors = [i.tensor for i in graph.inputs if i.role == "batch"]
    batch = [padded.get(tensor, tensor) for tensor in tensors]
    if named is not None:
        return batch
    sizes = {tensor: graph.tensors[tensor].type.shape[0] for tensor in batch}
    number = options.num_microbatches
    if max(sizes.values(), default=0) % number:
        return batch  # cannot be cut
    return [tensor for tensor in batch if sizes[tensor] % number == 0]


def batch_by_name(traced: TracedFunction, options: Options) -> list[int] | None:
    """The leaves that `batch_argnums` names, if it names any, in their order."""
    given = options.batch_argnums
    if given == "auto":
        return None
    numbers = [each for each in given if isinstance(each, int)]
    found = set(leaves_of(traced, numbers, options))
    paths = traced.input_paths
    for key in (each for each in given if isinstance(each, str)):
        whole = spellings(key)[1]
        below = [p for p in paths if f"{spellings(p)[1]}/".startswith(f"{whole}/")]
        below = below or [*keys_of_paths([key], paths, "name in `batch_argnums`")]
        found.update(leaf for leaf, path in enumerate(paths) if path in below)
    return sorted(found)


def roles_of(
    traced: TracedFunction,
    donated: Collection[int] = (),
    batch: Collection[int] | None = None,
) -> Roles:
    """Which leaves of a traced function are state and which the batch.

    `donated` are leaves that are given away by name, `batch` those named as such.
    """
    jaxpr = traced.jaxpr.jaxpr
    inputs = [tensor_type(var.aval) for var in jaxpr.invars]
    outputs = [tensor_type(var.aval) for var in jaxpr.outvars]
    roles = infer_roles(
        *(traced.in_tree, traced.out_tree, inputs, outputs, traced.input_paths),
        derived_results(jaxpr),
        donated,
    )
    if batch is None:
        roles = batch_by_use(traced, roles)
    else:
        roles = roles.with_batch(batch)
    return replace(roles, notes=(*roles.notes, *_unread(traced, roles)))


def _unread(traced: TracedFunction, roles: Roles) -> Iterator[str]:
    """What to tell of a step whose work JAX drops, as no result is made of it."""
    jaxpr = traced.jaxpr.jaxpr
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    read |= {id(var) for var in jaxpr.outvars}
    is_batch = [role == "batch" for role in roles.roles]
    batch = list(itertools.compress(jaxpr.invars, is_batch))
    if not jaxpr.outvars and not jaxpr.eqns and jaxpr.invars:
        why = "it returns nothing"
    elif batch and read.isdisjoint(map(id, batch)):
        paths = itertools.compress(traced.input_paths, is_batch)
        why = f"nothing that it returns depends on its batch, {', '.join(paths)}"
    else:
        return
    yield (
        f"{traced.name} should return what it computes, such as the new state and the "
        f"loss, but {why}: JAX drops work that no result is made of, and so the plan "
        f"has none of it. Return the results."
    )


def donated_by_name(traced: TracedFunction, options: Options) -> list[int]:
    """Leaf positions of the arguments that `donate_argnums` names."""
    named = options.donate_argnums
    if named == "auto":
        return []
    return leaves_of(traced, named, options, options.donate_argnames)


def leaves_of(
    traced: TracedFunction,
    argnums: Sequence[int],
    options: Options,
    argnames: Sequence[str] = (),
) -> list[int]:
    """Leaf positions of arguments by position, by keyword, and of `argnames`."""
    leaves = range(traced.in_tree.num_leaves)
    args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
    positions = (i for i in itertools.count() if i not in options.static_argnums)
    chosen = [each for each, i in zip(args, positions, strict=False) if i in argnums]
    names = options.names_at(argnums, argnames)
    return jax.tree.leaves([chosen, [kwargs[n] for n in names if n in kwargs]])
