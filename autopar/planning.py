"""Plan a function for one signature: trace, roles, graph, microbatches, solve."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax

from . import rules as _rules
from .build_graph import build_graph, tensor_type
from .cluster import Cluster
from .constraints import warn_ignored_constraints
from .graph import OpGraph
from .intra_op import plan_intra_op, warn_fallbacks
from .mesh import MeshShape, parse_mesh
from .microbatch_loop import cut_into_microbatches
from .options import Options
from .parallel_plan import Plan
from .pins import Pin, resolve_pins
from .placements import placement_pins
from .plan_file import check_against
from .roles import Roles, infer_roles
from .tracing import TracedFunction, trace
from .user_shard_map import check_shard_maps, user_mesh

_log = logging.getLogger("autopar")
assert _rules  # imported so that every rule registers


@dataclass(frozen=True, eq=False)
class Planned:
    """One signature of a function: its trace, graph, plan and argument types."""

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    plan: Plan
    cluster: Cluster
    argument_types: tuple[jax.ShapeDtypeStruct, ...]

    def summary(self) -> str:
        """One line: the mesh, and what was taken as state and batch."""
        roles = self.roles.summary(self.traced.input_paths)
        return f"{self.traced.name} on {self.plan.sharding.mesh}: {roles}"


def plan_function(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> Planned:
    """Trace `fun` on its dynamic arguments and plan it, or check the plan given."""
    traced = trace(fun, args, kwargs)
    avals = [var.aval for var in traced.jaxpr.jaxpr.invars]
    roles = roles_of(traced)
    graph = build_graph(traced, roles)
    if options.num_microbatches > 1:
        batch = batch_tensors(traced, graph, options)
        traced = cut_into_microbatches(traced, graph, batch, options.num_microbatches)
        graph = build_graph(traced, roles)
    cluster = options.cluster or Cluster.local()
    mesh = _mesh_shape(options, cluster, graph)
    check_shard_maps(graph, mesh)
    plan = options.plan
    if plan is None:
        placed = placement_pins(jax.tree.leaves((args, kwargs)), graph, mesh)
        plan = _solve(graph, mesh, cluster, options, placed)
    else:
        check_against(plan.sharding, graph)
    types = tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in avals
    )
    return Planned(traced, graph, roles, plan, cluster, types)


def roles_of(traced: TracedFunction) -> Roles:
    """Which leaves of a traced function are state and which the batch."""
    jaxpr = traced.jaxpr.jaxpr
    return infer_roles(
        traced.in_tree,
        traced.out_tree,
        [tensor_type(var.aval) for var in jaxpr.invars],
        [tensor_type(var.aval) for var in jaxpr.outvars],
        traced.input_paths,
    )


def _solve(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    options: Options,
    placed: Mapping[int, Pin],
) -> Plan:
    warn_fallbacks(graph)
    warn_ignored_constraints(graph, mesh)
    start = perf_counter()
    pins = {**placed, **resolve_pins(options.pins, graph, mesh)}
    solution = plan_intra_op(graph, mesh, cluster, pins=pins)
    _log.info(
        "%s: planned %d operators in %.1f s, gap %.3g%%",
        graph.name,
        len(graph.operators()),
        perf_counter() - start,
        100 * solution.assignment.gap,
    )
    return Plan(solution.plan)


def many_signatures(first: Planned, latest: Planned, number: int) -> str:
    """What to tell a user whose function is compiled again and again."""
    name, changed = first.traced.name, "its constants or the tree of its arguments"
    if first.traced.in_tree == latest.traced.in_tree:
        types = zip(first.argument_types, latest.argument_types, strict=True)
        path, (old, new) = next(
            (path, pair)
            for path, pair in zip(first.traced.input_paths, types, strict=True)
            if pair[0] != pair[1] or pair[0].weak_type != pair[1].weak_type
        )
        changed = f"{path}, which was {_type_text(old)} and is {_type_text(new)}"
    return (
        f"{name} should be called with few kinds of arguments, as each is planned and "
        f"compiled, but by now it was with more than {number}: what changed is "
        f"{changed}. Pad batches to a few sizes, and pass numbers as arrays."
    )


def _type_text(kind: jax.ShapeDtypeStruct) -> str:
    return f"{'weak ' * kind.weak_type}{kind.dtype.name}{list(kind.shape)}"


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


def batch_tensors(
    traced: TracedFunction, graph: OpGraph, options: Options
) -> list[int]:
    """Graph inputs that are cut into microbatches along their first dim."""
    if options.batch_argnums == "auto":
        return [i.tensor for i in graph.inputs if i.role == "batch"]
    chosen = leaves_of(traced, options.batch_argnums, options)
    return [graph.inputs[leaf].tensor for leaf in chosen]


def _mesh_shape(options: Options, cluster: Cluster, graph: OpGraph) -> MeshShape:
    if options.plan is not None:
        return options.plan.sharding.mesh
    if options.mesh is not None:
        return parse_mesh(options.mesh, cluster.num_devices)
    own = user_mesh(graph)
    if own is not None:
        return own
    if cluster.num_hosts > 1:
        sizes = (cluster.num_hosts, cluster.devices_per_host)
        return MeshShape(("data", "model"), sizes)
    return MeshShape(("x",), (cluster.num_devices,))
