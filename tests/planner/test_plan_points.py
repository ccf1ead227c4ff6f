"""Rows of memory of one plan, beside what the model of memory says of other plans."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.gather_again import gathering_again
from autopar.methods.named_methods import NamedMethod, restriction_of
from autopar.methods.restrictions import restrict
from autopar.planner.budget_candidates import BudgetCandidates
from autopar.planner.intra_op import plan_intra_op, read_profile
from autopar.planner.plan_points import PlanPoints
from autopar.planner.planning import roles_of
from autopar.planner.program_points import memory_rows
from autopar.planner.reading_spans import reading_spans
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.solver.solve import solve
from benchmarks.models import build

MESH, CLUSTER = parse_mesh("x:8", 8), Cluster.local()


@cache
def graph() -> OpGraph:
    workload = build("gpt", num_layers=4)
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


def batch() -> list[int]:
    return [each.tensor for each in graph().inputs if each.role == "batch"]


@cache
def planned() -> tuple[ShardingProblem, Resharder, Any]:
    """The problem with what may be gathered again, and its free solution."""
    resharder = Resharder(MESH, CLUSTER)
    again = gathering_again(graph())
    problem = build_problem(again, MESH, CLUSTER, resharder, counts_memory=True)
    return problem, resharder, solve(problem.choice_graph, gap=1e-3)


METHODS = {
    # Arguments that lie whole are copied, as they are read after what replaces them.
    "data parallel": (autopar.DataParallel(), 0.1),
    "ZeRO-2": (autopar.Zero(2), 0.13),
    "ZeRO-3, kept": (autopar.Zero(3, reshard_after_forward=False), 0.08),
    "ZeRO-3": (autopar.Zero(3), 0.08),
}


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_the_free_plan_know_what_methods_hold(name: str) -> None:
    """Where arguments lend no memory, copies of parameters are dropped or kept, and
    values are held that the free plan makes again."""
    method, most_off = METHODS[name]
    problem, resharder, free = planned()
    profile = read_profile(problem, free, CLUSTER, resharder)
    rows = memory_rows(problem, profile, free.choices)
    assert rows[0].used(free.choices) == pytest.approx(profile.live_bytes)
    limit = restriction_of(method, problem.graph, MESH, batch())
    found = solve(restrict(problem, (limit,), CLUSTER).choice_graph, gap=1e-2)
    other = read_profile(problem, found, CLUSTER, resharder).live_bytes
    said = max(row.used(found.choices) for row in rows)
    assert said == pytest.approx(other, rel=most_off)


def test_rows_tell_what_lies_in_the_memory_of_arguments() -> None:
    problem, resharder, free = planned()
    profile = read_profile(problem, free, CLUSTER, resharder)
    points = PlanPoints(problem, profile, free.choices)
    block = profile.liveness[0]
    position = max(
        range(len(block.order)),
        key=lambda at: points.at(0, at, tells_lent=True).lent_bytes,
    )
    told = points.at(0, position, tells_lent=True)
    values = block.block.values
    expected = sum(values[v].bytes for v in block.live(position) if v in block.borrowed)
    assert told.lent_bytes == expected > 0
    assert points.at(0, position).lent == ()
    assert (told.whole & ~points.at(0, position).whole).any()


def test_what_is_sliced_at_a_barrier_frees_no_memory() -> None:
    """A parameter that lies whole and passes a barrier split is not kept behind it: it
    takes no memory, and makes up for none."""
    workload, resharder = build("lstm"), Resharder(MESH, CLUSTER)
    traced = trace(workload.step, workload.abstract(), {})
    again = gathering_again(build_graph(traced, roles_of(traced)))
    problem = build_problem(again, MESH, CLUSTER, resharder, counts_memory=True)
    batch = [each.tensor for each in again.inputs if each.role == "batch"]
    limit = restriction_of(autopar.DataParallel(), again, MESH, batch)
    whole = solve(restrict(problem, (limit,), CLUSTER).choice_graph, gap=1e-3)
    profile = read_profile(problem, whole, CLUSTER, resharder)
    points, choices = PlanPoints(problem, profile, whole.choices), list(whole.choices)
    held = problem.choice_graph.bytes_by_node
    count = len(profile.liveness[0].order)
    kept = {each for at in range(count) for each in points.at(0, at).kept}
    is_whole = [held[home][choices[home]] >= amount for home, _, amount, _ in kept]
    assert len(kept) > 3 and all(is_whole)
    for _, port, amount, _ in kept:
        choices[port] = int((held[port] < amount).argmax())
        assert held[port][choices[port]] < amount
    said = [
        row.used(choices)
        for row in memory_rows(problem, profile, choices=whole.choices)
    ]
    assert max(said) > 0.95 * profile.live_bytes


def test_what_is_done_again_is_read_until_its_readers_are_made() -> None:
    """A residual that no plan writes to memory is needed by the backward pass."""
    problem, resharder, free = planned()
    profile = read_profile(problem, free, CLUSTER, resharder)
    liveness, block = profile.liveness[0], problem.graph.blocks[0]
    spans = reading_spans(block, liveness, len(problem.graph.tensors), ())
    made = {
        values.tensor
        for k, values in zip(
            liveness.block.maker.tolist(), liveness.block.values, strict=True
        )
        if k >= 0 and not values.is_copy
    }
    adds = [op.results[0] for op in block.operators if op.name.startswith("jvp()/add")]
    fused = [tensor for tensor in adds if tensor not in made]
    assert fused and not spans.in_memory[fused].any()
    longest = max(int(spans.last[t] - spans.first[t]) for t in fused)
    assert longest > len(liveness.order) // 4


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Zero(3)])
def test_copies_in_a_wider_dtype_weigh_on_what_they_are_made_of(
    method: NamedMethod,
) -> None:
    """CPUs make float32 copies of bfloat16: nothing of them is there in every plan."""
    options: dict[str, Any] = {"remat": True, "compute_dtype": "bfloat16"}
    workload = build("gpt", num_layers=4, batch_size=8, seq_len=8, **options)
    traced = trace(workload.step, workload.abstract(), {})
    own = build_graph(traced, roles_of(traced))
    examples = [each.tensor for each in own.inputs if each.role == "batch"]
    again, resharder = gathering_again(own), Resharder(MESH, CLUSTER)
    problem = build_problem(again, MESH, CLUSTER, resharder, counts_memory=True)
    limit = restriction_of(method, again, MESH, examples)
    found = solve(restrict(problem, (limit,), CLUSTER).choice_graph, gap=1e-2)
    profile = read_profile(problem, found, CLUSTER, resharder)
    assert profile.liveness[0].block.wide
    rows = memory_rows(problem, profile, found.choices)
    assert rows[0].used(found.choices) == profile.live_bytes
    assert max(row.constant for row in rows) < 0.05 * profile.live_bytes


@pytest.mark.slow
def test_a_budget_that_binds_takes_less_than_sharding_all_state() -> None:
    free = plan_intra_op(graph(), MESH, CLUSTER).plan.predicted
    budget = int(0.8 * free.peak_bytes)
    place = graph(), MESH, CLUSTER, budget, batch(), {}, 1e-4
    found = BudgetCandidates(*place).best().plan.predicted
    assert found.peak_bytes <= budget
    assert found.optimality_gap <= 0.0101
    limit = restriction_of(autopar.Zero(3), gathering_again(graph()), MESH, batch())
    sharded = plan_intra_op(
        gathering_again(graph()), MESH, CLUSTER, restrictions=[limit]
    ).plan.predicted
    assert sharded.peak_bytes <= budget
    assert found.step_seconds < 0.97 * sharded.step_seconds


@pytest.mark.slow
def test_where_nothing_fits_the_least_that_a_method_holds_is_named() -> None:
    """And given that budget it is planned."""
    workload = build("mlp", num_layers=3)
    traced = trace(workload.step, workload.abstract(), {})
    own = build_graph(traced, roles_of(traced))
    examples = [each.tensor for each in own.inputs if each.role == "batch"]

    def candidates(budget: int) -> BudgetCandidates:
        return BudgetCandidates(own, MESH, CLUSTER, budget, examples, {}, 1e-4)

    again = gathering_again(own)
    limit = restriction_of(autopar.Zero(3), again, MESH, examples)
    sharded = plan_intra_op(again, MESH, CLUSTER, restrictions=[limit]).plan.predicted
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        candidates(10_000).best()
    least = raised.value.least_budget_bytes
    assert least is not None and 10_000 < least <= sharded.peak_bytes
    assert candidates(least).best().plan.predicted.peak_bytes <= least
