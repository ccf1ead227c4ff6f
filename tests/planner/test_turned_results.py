"""What rows of memory say of results that collectives gather and turn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner.intra_op import read_profile
from autopar.planner.planning import roles_of
from autopar.planner.program_points import memory_rows
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.sharding.spec import Spec
from autopar.solver.solve import solve

MESH, CLUSTER = parse_mesh("x:2;y:4", 8), Cluster.local()


def planned(problem: ShardingProblem, tensor: int, specs: tuple[Spec, Spec]) -> Any:
    """The cheapest plan that makes a tensor in one spec, and copies it to another."""
    seconds = [each.seconds.copy() for each in problem.vertices]
    writer, made = problem.writers[tensor]
    seconds[writer][~made.choices.are(specs[0])] = np.inf
    for number, vertex in enumerate(problem.vertices):
        for read in vertex.reads:
            if read.tensor == tensor and number != problem.relays[tensor]:
                seconds[number][~read.choices.are(specs[1])] = np.inf
    limited = problem.with_seconds(seconds, np.arange(len(seconds)))
    return solve(limited.choice_graph, gap=1e-3)


def test_a_row_knows_how_much_of_a_result_others_gather() -> None:
    """The row of a plan that gathers a product whole, asked of one that gathers it over
    one axis: its result, and what is turned of it, are half as large."""

    def step(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return (x @ w1) @ w2

    x, w1 = jnp.zeros((2048, 16)), jnp.zeros((16, 256))
    traced = trace(step, (x, w1, jnp.zeros((256, 16))), {})
    graph = build_graph(traced, roles_of(traced))
    resharder = Resharder(MESH, CLUSTER)
    problem = build_problem(graph, MESH, CLUSTER, resharder, counts_memory=True)
    tensor = graph.operators()[0].results[0]
    whole, halves = [
        planned(problem, tensor, ((1, 1), target)) for target in ((-1, -1), (1, -1))
    ]
    held, of_halves = [
        read_profile(problem, each, CLUSTER, resharder) for each in (whole, halves)
    ]
    rows = memory_rows(problem, held, whole.choices)
    assert max(row.used(whole.choices) for row in rows) == held.live_bytes
    said = max(row.used(halves.choices) for row in rows)
    assert said == pytest.approx(of_halves.live_bytes, rel=0.02)
    assert of_halves.live_bytes < 0.6 * held.live_bytes
