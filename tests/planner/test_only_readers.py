"""Who alone reads an argument reads its relay's copy, so that rows tell of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.restrictions import Restriction, restrict
from autopar.planner.planning import roles_of
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.sharding.spec import Spec, is_pending
from autopar.solver.solve import solve

MESH, CLUSTER = parse_mesh("x:2;y:4", 8), Cluster.local()


def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
    def loss(given: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(jax.nn.relu(x @ given["first"]) @ given["second"])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@cache
def problem() -> ShardingProblem:
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    traced = trace(step, ({"first": matrix, "second": matrix}, matrix), {})
    graph = build_graph(traced, roles_of(traced))
    resharder = Resharder(MESH, CLUSTER)
    return build_problem(graph, MESH, CLUSTER, resharder, counts_memory=True)


def pairs_read(name: str) -> set[tuple[Spec, Spec]]:
    """The specs of a parameter's relay and of its first reader that go together."""
    whole = problem()
    tensors = [t for t in whole.relays if whole.graph.tensors[t].name.endswith(name)]
    relay, reads = whole.relays[tensors[0]], whole.columns.reads
    edges = whole.choice_graph.edges
    readers = reads.vertex[(reads.tensor == tensors[0]) & ~whole.is_late]
    reader = int(min(readers))
    edge = next(e for e in edges if (e.first, e.second) == (relay, reader))
    held = whole.vertices[relay].writes[0].choices
    at = int(np.flatnonzero((reads.vertex == reader) & (reads.tensor == tensors[0]))[0])
    read = whole.columns.choices[reads.choices[at]]
    return {
        (held.of(a), read.of(b))
        for a in range(len(edge.first_class))
        for b in range(len(edge.second_class))
        if np.isfinite(edge.costs[edge.first_class[a], edge.second_class[b]])
    }


def test_an_only_reader_reads_the_relay_as_it_is() -> None:
    pairs = pairs_read("['first']")
    settled = {(held, read) for held, read in pairs if not is_pending(read)}
    assert len(settled) > 4
    assert all(held == read for held, read in settled)


def test_of_two_readers_one_may_read_a_slice_of_it() -> None:
    assert any(held != read for held, read in pairs_read("['second']"))


def sorted_step(given: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ jnp.sort(given, axis=0))


def test_a_demand_that_the_only_reader_cannot_meet_leaves_a_plan() -> None:
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    traced = trace(sorted_step, (matrix, matrix), {})
    graph = build_graph(traced, roles_of(traced))
    resharder = Resharder(MESH, CLUSTER)
    whole = build_problem(graph, MESH, CLUSTER, resharder, counts_memory=True)
    rows = frozenset((0,))
    demand = {graph.inputs[0].tensor: (rows, rows)}
    limit = Restriction("rows", everywhere=demand, made={}, homes={})
    found = solve(restrict(whole, (limit,), CLUSTER).choice_graph)
    vertex, home = whole.writers[graph.inputs[0].tensor]
    assert home.choices.of(found.choices[vertex]) == (0, 0)
    assert found.cost < np.inf
