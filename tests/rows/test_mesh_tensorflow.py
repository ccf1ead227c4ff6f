"""Rows of Mesh-TensorFlow: layouts of named dims, and sums that are reduced late."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import (
    BATCH,
    HEADS,
    HIDDEN,
    LM_SEQ,
    LM_VOCAB,
    MLP,
    Case,
    f1,
    random,
    transformer_lm,
)
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


TRANSFORMER_MESH = "batch:2;model:4"
TRANSFORMER_LAYOUT = {BATCH: "batch", HEADS: "model", MLP: "model", LM_VOCAB: "model"}


def test_mtf_6_batch_heads_hidden_and_words_of_a_transformer() -> None:
    """Four sums of (b/2) s h bytes a layer, and one each for lookup and head. Of the
    cross-entropy's three scalars a token the last joins the mean's sum."""
    case = transformer_lm()
    plan = plan_of_layout(case, TRANSFORMER_MESH, TRANSFORMER_LAYOUT)
    by_axes = traffic(plan)
    activation, scalars = BATCH // 2 * LM_SEQ * HIDDEN * 4, BATCH // 2 * LM_SEQ * 4
    assert by_axes.pop(("all_reduce", "model")) == [activation] * 10 + [scalars] * 2
    assert by_axes.pop(("all_reduce", "batch,model")) == [4]
    gradients = by_axes.pop(("all_reduce", "batch"))
    assert not by_axes
    params = jax.tree.leaves(case.args[0][0])
    assert sorted(gradients, reverse=True) == sorted(
        (p.nbytes // (4 if p.ndim > 1 else 1) for p in params), reverse=True
    )
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


def test_mtf_6_parameters_and_moments_lie_in_quarters() -> None:
    case = transformer_lm()
    plan = plan_of_layout(case, TRANSFORMER_MESH, TRANSFORMER_LAYOUT)
    leaves = jax.tree.leaves(case.args[0])
    for planned, leaf in zip(plan.sharding.inputs, leaves, strict=False):
        assert planned.role == "state"
        assert planned.bytes == leaf.nbytes // (4 if leaf.ndim > 1 else 1)


def test_mtf_6_the_loss_curve_is_that_of_one_device() -> None:
    case = transformer_lm()
    plan = plan_of_layout(case, TRANSFORMER_MESH, TRANSFORMER_LAYOUT)
    expected = list(losses(jax.jit(case.step), case))
    for step in (
        autopar.parallelize(case.step, plan=plan),
        autopar.parallelize(case.step, mesh=TRANSFORMER_MESH),
    ):
        np.testing.assert_allclose(list(losses(step, case)), expected, rtol=1e-4)


def test_mtf_6_the_solver_gathers_no_logits_and_is_no_slower() -> None:
    case = transformer_lm()
    named = plan_of_layout(case, TRANSFORMER_MESH, TRANSFORMER_LAYOUT)
    step = autopar.parallelize(case.step, mesh=TRANSFORMER_MESH)
    plan = run_as_planned(step, *case.args).plan
    assert plan.predicted.step_seconds < named.predicted.step_seconds
    assert sent_bytes(plan) < sent_bytes(named)
    largest = max(max(sizes) for sizes in traffic(plan).values())
    assert largest < BATCH * LM_SEQ * LM_VOCAB * 4


def losses(step: Any, case: Case) -> Iterable[float]:
    """Those of five steps."""
    state, *batch = jax.tree.map(jnp.copy, case.args)
    for _ in range(5):
        state, loss = step(state, *batch)
        yield float(loss)
