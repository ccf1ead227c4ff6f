"""Plans between ZeRO-3 and the cheapest of all, which searches within budgets meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.gather_again import gathering_again
from autopar.methods.named_methods import Zero, restriction_of
from autopar.methods.restrictions import Restriction, restrict
from autopar.methods.zero_restriction import split_state, within_groups
from autopar.planner.intra_op import read_profile
from autopar.planner.planning import roles_of
from autopar.planner.relay_ties import RelayTies
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.sharding.spec import REPLICATED, Spec, num_shards
from autopar.solver.assignment import Assignment
from autopar.solver.descent import Descent
from autopar.solver.solve import solve
from benchmarks.models import build

MESH, CLUSTER = parse_mesh("x:2;y:4", 8), Cluster.local()


@cache
def problem() -> tuple[ShardingProblem, Restriction]:
    """Of a GPT with momentum, and what ZeRO-3 leaves of it."""
    workload = build("gpt", num_layers=2)
    traced = trace(workload.step, workload.abstract(), {})
    graph = gathering_again(build_graph(traced, roles_of(traced)))
    resharder = Resharder(MESH, CLUSTER)
    found = build_problem(graph, MESH, CLUSTER, resharder, counts_memory=True)
    return found, restriction_of(Zero(3), graph, MESH, batch_of(graph))


def batch_of(graph: OpGraph) -> list[int]:
    return [each.tensor for each in graph.inputs if each.role == "batch"]


def solved(limit: Restriction) -> Assignment:
    return solve(restrict(problem()[0], (limit,), CLUSTER).choice_graph)


def homes(found: Assignment) -> dict[str, Spec]:
    """Where matrices of the state lie, by name."""
    whole, graph = problem()[0], graph_of_step()
    state = [e.tensor for e in graph.inputs if e.role == "state"]
    return {
        graph.tensors[t].name: made.choices.of(found.choices[vertex])
        for t in state
        if graph.tensors[t].type.rank > 1
        for vertex, made in [whole.writers[t]]
    }


def graph_of_step() -> OpGraph:
    return problem()[0].graph


def test_parameters_within_groups_lie_whole_in_each_and_other_state_is_split() -> None:
    found = homes(solved(within_groups(problem()[1], graph_of_step())))
    parameters = {name: spec for name, spec in found.items() if ".params" in name}
    others = {name: spec for name, spec in found.items() if ".params" not in name}
    assert len(parameters) > 10 and len(others) >= len(parameters)
    for name, (major, minor) in parameters.items():
        assert major == REPLICATED and minor != REPLICATED, name
    for name, spec in others.items():
        assert REPLICATED not in spec, name


def test_work_of_any_kind_on_split_state_costs_no_more_than_zero() -> None:
    zero = problem()[1]
    own, free = solved(zero), solved(split_state(zero, graph_of_step()))
    assert homes(free) == homes(own)
    assert free.cost <= own.cost * (1 + 1e-9)


def test_what_is_whole_for_the_forward_pass_is_not_kept_for_the_update() -> None:
    """The part that a device updates is no slice of its group's: it is sent for, not
    cut off a copy that would be held from the forward pass on."""
    whole, zero = problem()
    found = solved(within_groups(zero, graph_of_step()))
    profile = read_profile(whole, found, CLUSTER, Resharder(MESH, CLUSTER))
    graph, method = graph_of_step(), Zero(3, reshard_after_forward=False)
    kept = restriction_of(method, graph, MESH, batch_of(graph))
    others = read_profile(whole, solved(kept), CLUSTER, Resharder(MESH, CLUSTER))
    assert profile.live_bytes < others.live_bytes
    sizes, sent = MESH.axis_sizes, 0
    reads, columns = whole.columns.reads, whole.columns
    for at in np.flatnonzero(whole.is_late).tolist():
        tensor, vertex = int(reads.tensor[at]), int(reads.vertex[at])
        spec = columns.choices[reads.choices[at]].of(found.choices[vertex])
        plan = profile.plan.tensors[tensor]
        for each in plan.conversions:
            if each.target == spec:
                assert num_shards(each.source, sizes) >= num_shards(plan.spec, sizes)
                sent += 1
    assert sent > 10


def test_relays_that_nobody_reads_as_they_are_hold_the_least() -> None:
    """A stop on the way is left out, where that is no dearer."""
    whole, zero = problem()
    found = solved(zero).choices
    graph, ties = whole.choice_graph, RelayTies(whole)
    relays = list(whole.relays.values())
    descent = Descent(graph, relays)
    num_left_out = 0
    for relay in relays:
        costs, held = descent.values(relay, found), graph.bytes_by_node[relay]
        is_stop = (costs > costs[found[relay]]) & (held > held[found[relay]])
        for stop in np.flatnonzero(is_stop & np.isfinite(costs))[:2].tolist():
            changed = (*found[:relay], stop, *found[relay + 1 :])
            least = ties.holding_least(changed)
            assert graph.cost(least) <= graph.cost(changed)
            if held[least[relay]] < held[stop]:
                num_left_out += 1
                assert held[least[relay]] <= held[found[relay]]
    assert num_left_out > 50
    assert ties.holding_least(found) == found


def momentum_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        made = x
        for each in weights:
            made = jnp.tanh(made @ each)
        return jnp.mean((made - y) ** 2)

    weights, moments = state
    value, grads = jax.value_and_grad(loss)(weights)
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    after = [w - 0.1 * (m + 0.01 * w) for w, m in zip(weights, moments, strict=True)]
    return (after, moments), value


@pytest.mark.slow
def test_parameters_within_groups_beside_state_over_all_run_within_a_budget() -> None:
    """What the update reads of a parameter is a part of what lies there."""
    keys = jax.random.split(jax.random.key(0), 6)
    weights = [0.06 * jax.random.normal(key, (256, 256)) for key in keys[:4]]
    state = weights, [jnp.zeros_like(each) for each in weights]
    x, y = (jax.random.normal(key, (64, 256)) for key in keys[4:])
    expected = jax.jit(momentum_step)(state, x, y)
    pins = {r"state\[0\]": PartitionSpec("y"), r"state\[1\]": PartitionSpec(("x", "y"))}
    place: dict[str, Any] = {"mesh": "x:2;y:4", "pins": pins}
    free = autopar.parallelize(momentum_step, **place).plan(state, x, y)
    budget = int(0.92 * free.predicted.peak_bytes)
    step = autopar.parallelize(momentum_step, memory_budget=budget, **place)
    plan = step.plan(state, x, y).sharding
    assert plan.predicted.peak_bytes <= budget
    for each in plan.tensors:
        if each.name.startswith("state[0]"):
            assert each.spec == (REPLICATED, 0)
            assert all(made.source == each.spec for made in each.conversions)
            parts = {num_shards(x.target, MESH.axis_sizes) for x in each.conversions}
            assert 8 in parts
    step.lower(state, x, y).compile().audit().raise_if_wrong()
    found = step(state, x, y)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
