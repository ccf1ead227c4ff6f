"""Rows of memory of problems within budgets: relays, copies, what plans hold."""

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.costs.memory import memory_profile
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.gather_again import gathering_again
from autopar.methods.named_methods import Zero, restriction_of
from autopar.methods.restrictions import restrict
from autopar.planner import met_plans
from autopar.planner.intra_op import read_plan
from autopar.planner.planning import roles_of
from autopar.planner.program_points import memory_rows
from autopar.planner.relay_choices import lasting_tensors, without_needless_copies
from autopar.planner.sharding_problem import build_problem
from autopar.sharding.resharding import Resharder
from autopar.solver import solve
from benchmarks.models import build
from tests.planner.tiny_gpt import MESH, gpt


def test_rows_say_of_their_own_plan_what_the_model_says() -> None:
    cluster = Cluster.local()
    resharder = Resharder(MESH, cluster)
    problem = build_problem(gpt(), MESH, cluster, resharder, counts_memory=True)
    assignment = solve(problem.choice_graph)
    profile = memory_profile(gpt(), read_plan(problem, assignment, cluster, resharder))
    rows = memory_rows(problem, profile, assignment.choices)
    used = [row.used(assignment.choices) for row in rows]
    assert used[0] == max(used) == profile.live_bytes
    assert all((held >= 0).all() for row in rows for held in row.weights)


def test_what_lasts_has_a_relay_even_for_one_reader() -> None:
    """So that a slice which its only reader gathers is a copy that rows see."""
    cluster = Cluster.local()
    resharder = Resharder(MESH, cluster)
    problem = build_problem(gpt(), MESH, cluster, resharder, counts_memory=True)
    reads = problem.columns.reads
    read = reads.tensor[~np.isin(reads.vertex, list(problem.relays.values()))]
    once = set(np.flatnonzero(np.bincount(read) == 1).tolist())
    assert once & lasting_tensors(gpt())
    assert lasting_tensors(gpt()) & set(read.tolist()) <= problem.relays.keys()


def test_a_copy_in_the_spec_it_lies_in_is_no_copy() -> None:
    cluster = Cluster.local()
    resharder = Resharder(MESH, cluster)
    problem = build_problem(gpt(), MESH, cluster, resharder, counts_memory=True)
    lasting = lasting_tensors(gpt())
    relays = {
        t: (v, problem.vertices[v].writes[0].choices)
        for t, v in problem.relays.items()
        if t in lasting
    }
    writers = {t: (v, a.choices) for t, (v, a) in problem.writers.items()}
    choices = list(solve(problem.choice_graph).choices)
    for relay, specs in relays.values():
        half = len(specs.classes) // 2
        choices[relay] = choices[relay] % half + half
    fewer = without_needless_copies(choices, relays, writers)
    graph = problem.choice_graph
    held = [graph.nodes[relay].bytes[fewer[relay]] for relay, _ in relays.values()]
    assert graph.cost(fewer) == pytest.approx(graph.cost(choices))
    assert held.count(0.0) > len(held) // 2


@pytest.mark.parametrize("reshards", [False, True])
def test_copies_of_parameters_are_gone_when_what_is_split_is_updated(
    reshards: bool,
) -> None:
    """The plan without a budget reads whole parameters as they lie, to the last slice
    that it updates; FSDP reads those slices where they lie, and drops its copies.
    """
    workload = build("llama", num_layers=1)
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    cluster, resharder = Cluster.local(), Resharder(MESH, Cluster.local())
    again = gathering_again(graph)
    problem = build_problem(again, MESH, cluster, resharder, counts_memory=True)
    least = solve(problem.choice_graph)
    met = met_plans.MetPlans(problem, cluster, resharder, least, 0.0)
    method = Zero(3, reshard_after_forward=reshards)
    place = again if reshards else graph
    limit = restriction_of(method, place, MESH, batch)
    fsdp = met.see(solve(restrict(problem, (limit,), cluster).choice_graph))
    free = met.plans[0]
    assert fsdp.live_bytes < free.live_bytes
    said = max(row.used(fsdp.choices) for row in met.rows)
    assert said <= 1.1 * fsdp.live_bytes
    assert max(row.used(free.choices) for row in met.rows) == free.live_bytes
