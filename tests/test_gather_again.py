"""Barriers before the backward readers of parameters, and what plans make of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.graph.build_graph import BARRIER
from autopar.graph.op_graph import OpGraph
from autopar.graph.paired_operators import companions
from autopar.planner.gather_again import gathering_again, graph_of_plan
from autopar.planner.planning import plan_traced
from autopar.planner.whole_step import trace_whole
from autopar.plans.plan import ShardingPlan
from benchmarks.models import build
from tests.rows.fixtures import Case, f1, f3, random, sgd
from tests.rows.named_plans import graph_of
from tests.rows.running import run_as_planned, traffic
from tests.rows.test_fairscale import f2

ADAM = optax.adam(1e-2, eps=1e-3)


def barriers(graph: OpGraph) -> list[str]:
    """The parameters that have one."""
    prefix = "gather_again/"
    return [
        op.name.removeprefix(prefix)
        for op in graph.operators()
        if op.name.startswith(prefix)
    ]


def test_a_kernel_that_both_passes_read_gets_a_barrier() -> None:
    """The first kernel's backward product is with the input, which has no gradient."""
    graph = gathering_again(graph_of(f2(ADAM)))
    names = [f"state[0]['kernel{i}']" for i in (1, 2, 3)]
    assert sorted(barriers(graph)) == names
    graph.verify()


def test_only_backward_readers_read_behind_it() -> None:
    graph = gathering_again(graph_of(f2(ADAM)))
    made = {op.results[0] for op in graph.operators() if op.kind == BARRIER}
    readers = [op for op in graph.operators() if made & {*op.operands}]
    assert readers and all("transpose(" in op.name for op in readers)


def test_it_waits_for_the_cotangent() -> None:
    graph = gathering_again(graph_of(f2(ADAM)))
    waits, operators = companions(graph.columns), graph.columns.operators
    assert len(waits) == 3
    for barrier, tensor in waits.items():
        maker = next(op for op in graph.operators() if tensor in op.results)
        assert "transpose(" in maker.name
        assert graph.tensors[tensor].type.shape == (64, 256)
        assert operators[barrier].kind == BARRIER


def test_a_step_without_gradients_is_left_as_it_is() -> None:
    graph = graph_of(Case(lambda w, x: jnp.tanh(x @ w), (jnp.ones((8, 8)),) * 2))
    assert gathering_again(graph) is graph


def test_done_twice_is_done_once() -> None:
    graph = gathering_again(graph_of(f3()))
    assert barriers(graph)
    assert gathering_again(graph) is graph


def test_a_cast_is_gathered_again_and_not_what_it_is_a_cast_of() -> None:
    """Kernels are f32, products bf16: the cast is what both passes read."""

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for kernel in params.values():
                hidden = jnp.tanh(hidden @ kernel.astype(jnp.bfloat16))
            return jnp.mean((hidden - y).astype(jnp.float32) ** 2)

        return sgd(params, jax.grad(loss)(params))

    params = {f"w{i}": random(i, 64, 64) for i in range(3)}
    x = random(8, 16, 64).astype(jnp.bfloat16)
    graph = gathering_again(graph_of(Case(step, (params, x, x))))
    assert len(barriers(graph)) == 2
    kinds = {
        graph.tensors[op.results[0]].type.dtype.name
        for op in graph.operators()
        if op.kind == BARRIER
    }
    assert kinds == {"bfloat16"}


def test_the_slices_of_a_loop_over_layers_need_none() -> None:
    """They are gathered in each iteration, of which the backward loop has its own."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ w), None

            return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)

        return sgd(params, jax.grad(loss)(params))

    case = Case(step, ({"w": random(0, 3, 64, 64)}, random(1, 16, 64)))
    graph = gathering_again(graph_of(case))
    assert not barriers(graph)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_every_microbatch_gathers_twice(num_microbatches: int) -> None:
    """A loop over microbatches is a step of its own: it gathers for each pass."""
    case = f1()
    method = autopar.Zero(3, num_microbatches=num_microbatches)
    step = autopar.parallelize(case.step, mesh="x:8", method=method)
    plan = run_as_planned(step, *case.args).plan
    gathered = traffic(plan)["all_gather", "x"]
    assert gathered == [262_144] * 3 * num_microbatches  # w has no second reader


def test_a_copy_that_is_kept_serves_what_is_made_again() -> None:
    """Kernels are gathered once; else for each pass, and to make values again."""
    workload = build("mlp")
    gathered: dict[tuple[bool, str | None], int] = {}
    for again, remat in ((False, None), (False, "full"), (True, "full")):
        method = autopar.Zero(3, reshard_after_forward=again)
        step = autopar.parallelize(
            workload.step, mesh="x:8", method=method, remat=remat
        )
        plan = step.plan(*workload.abstract())
        gathered[again, remat] = sum(traffic(plan)["all_gather", "x"])
    once = gathered[False, None]
    assert once <= gathered[False, "full"] < 1.02 * once
    assert gathered[True, "full"] > 2 * once


def test_a_plan_says_which_graph_it_is_of() -> None:
    case = f2(ADAM)
    graph = graph_of(case)
    for method, count in ((autopar.Zero(3), 3), (autopar.Zero(2), 0)):
        step = autopar.parallelize(case.step, mesh="x:8", method=method)
        plan = step.plan(*case.args).sharding
        assert len(barriers(graph_of_plan(graph, plan))) == count


def test_a_plan_within_a_budget_is_of_a_graph_that_may_gather_again() -> None:
    """Without a budget kernels are gathered once and kept. The budget leaves no room
    for all of them between the passes; the plan runs as planned, in less memory."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for kernel in params.values():
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.mean(hidden**2)

        return sgd(params, jax.grad(loss)(params))

    params = {f"kernel{i}": random(i, 256, 256, scale=0.06) for i in range(6)}
    case = Case(step, (params, random(8, 512, 256)))
    pins = {"kernel": jax.P("x"), "^x$": jax.P("x")}

    def planned(budget: int | None) -> ShardingPlan:
        step = autopar.parallelize(
            case.step, mesh="x:8", pins=pins, memory_budget=budget
        )
        whole = trace_whole(case.step, case.args, {}, step.options)
        return plan_traced(whole, step.options).plan

    kept = planned(None)
    assert traffic(autopar.Plan(kept))["all_gather", "x"] == [262_144] * 6
    budget = int(0.775 * kept.predicted.peak_bytes)
    again = planned(budget)
    graph = graph_of(case)
    assert not barriers(graph_of_plan(graph, kept))
    assert barriers(graph_of_plan(graph, again))
    assert again.predicted.peak_bytes <= budget
    run_as_planned(autopar.parallelize(case.step, plan=autopar.Plan(again)), *case.args)
    steps = [
        autopar.parallelize(case.step, plan=autopar.Plan(plan)).lower(*case.args)
        for plan in (kept, again)
    ]
    seen = [step.compile().audit() for step in steps]
    whole, parts = (each.memory.device_bytes for each in seen if each.memory)
    assert parts < whole
