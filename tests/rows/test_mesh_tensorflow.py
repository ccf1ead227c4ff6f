"""Rows of Mesh-TensorFlow: layouts of named dims, and sums that are reduced late."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Case, f1, random
from tests.rows.named_plans import plan_of_layout
from tests.rows.running import run_as_planned, sent_bytes, traffic

MESH = "rows:2;cols:4"


def test_mtf_3_split_reduced_dims_become_all_reduce() -> None:
    """F1 with batch:rows, hidden:cols: the hidden dim is reduced over the columns in
    the forward pass, the batch over the rows in the gradients."""
    case = f1()
    plan = plan_of_layout(case, MESH, {64: "rows", 512: "cols"})
    assert traffic(plan) == {
        ("all_reduce", "cols"): [16_384],
        ("all_reduce", "rows"): [65_536, 65_536],
    }
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({64: "rows", 128: "cols"}, {"rows": [65_536] * 2, "cols": [65_536] * 2}),
        ({64: "rows"}, {"rows": [262_144] * 2}),
        ({512: "cols"}, {"cols": [32_768]}),
        ({}, {}),
    ],
    ids=["batch,io", "batch", "hidden", "none"],
)
def test_mtf_3_only_the_axes_of_reduced_dims_carry_traffic(
    layout: dict[int, str], expected: dict[str, list[int]]
) -> None:
    plan = plan_of_layout(f1(), MESH, layout)
    assert traffic(plan) == {("all_reduce", axis): v for axis, v in expected.items()}


def test_mtf_3_no_layout_is_cheaper_than_the_solvers_plan() -> None:
    """With only the batch given to the rows the solver must find something as good as
    hidden:cols (155,648 B a step). It finds less: the batch is gathered over the rows,
    and the hidden dim split over rows and columns together."""
    case = f1()
    named = plan_of_layout(case, MESH, {64: "rows", 512: "cols"})
    pins = {"x": P("rows"), "y": P("rows")}
    step = autopar.parallelize(case.step, mesh=MESH, pins=pins)
    plan = step.plan(*case.args)
    assert sent_bytes(named) == 2 * (3 / 4 * 16_384 + 1 / 2 * 131_072) == 155_648
    assert plan.predicted.step_seconds < named.predicted.step_seconds
    assert sent_bytes(plan) == 1 / 2 * 32_768 + 2 * 7 / 8 * 32_768 == 73_728
    run_as_planned(step, *case.args)


def products() -> Case:
    """a b + c d, the contracted dims of size 64, results 32 x 16."""

    def step(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        return a @ b + c @ d

    shapes = ((32, 64), (64, 16), (32, 64), (64, 16))
    return Case(step, tuple(random(i, *shape) for i, shape in enumerate(shapes)))


def test_mtf_5_partial_sums_are_added_first_and_reduced_once() -> None:
    case = products()
    plan = plan_of_layout(case, "t:4", {64: "t"})
    assert traffic(plan) == {("all_reduce", "t"): [2_048]}
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


def test_mtf_5_the_solver_leaves_the_sum_scattered() -> None:
    """Nothing asks for the whole result: half of an all_reduce is enough."""
    case, mesh = products(), Mesh(jax.devices()[:4], ("t",))
    pins = {"a|c": P(None, "t"), "b|d": P("t")}
    step = autopar.parallelize(case.step, mesh=mesh, pins=pins)
    plan = step.plan(*case.args)
    assert traffic(plan) == {("reduce_scatter", "t"): [2_048 // 4]}
    run_as_planned(step, *case.args)


def test_mtf_5_a_replicated_term_joins_a_pending_sum() -> None:
    """A residual is kept on one shard and added before the reduction."""

    def step(a: jax.Array, b: jax.Array, residual: jax.Array) -> jax.Array:
        return jnp.tanh(residual + a @ b + (2.0 * a) @ b)

    case = Case(step, (random(0, 32, 64), random(1, 64, 16), random(2, 32, 16)))
    plan = plan_of_layout(case, "t:4", {64: "t"})
    assert traffic(plan) == {("all_reduce", "t"): [2_048]}
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)
