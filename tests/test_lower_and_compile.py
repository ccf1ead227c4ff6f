"""Each set of argument types has one plan and one program, made once."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.like_jit import (
    assert_same,
    count_compilations,
    make_batch,
    make_params,
    sgd_step,
)


def test_one_plan_and_program_for_each_batch_shape() -> None:
    step = autopar.parallelize(sgd_step, donate_argnums=())
    params, batches = make_params(), [make_batch(size) for size in (32, 64)]
    for batch in batches:
        assert_same(step(params, batch), jax.jit(sgd_step)(params, batch))
    with count_compilations() as compilations:
        for batch in batches:
            step(params, batch)
    assert not compilations
    plans = [step.plan(make_params(), make_batch(size)) for size in (32, 64, 32)]
    assert plans[0] is plans[2]
    assert plans[0] is not plans[1]


def test_later_calls_neither_trace_nor_compile() -> None:
    step = autopar.parallelize(sgd_step)
    params, _ = step(make_params(), make_batch())
    fresh, batch = make_params(), make_batch()
    host = jax.tree.map(np.asarray, batch)
    with count_compilations() as compilations:
        params, _ = step(params, batch)
        params, _ = step(params, host)
        params, _ = step(fresh, batch)
    assert not compilations


def test_lowering_and_calling_share_one_program_that_runs() -> None:
    step = autopar.parallelize(sgd_step)
    params, batch = make_params(), make_batch()
    expected = jax.jit(sgd_step)(params, batch)
    lowered = step.lower(params, batch)
    compiled = lowered.compile()
    assert "stablehlo" in lowered.as_text()
    assert "HloModule" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    compiled.audit().raise_if_wrong()
    with count_compilations() as compilations:
        found = step(params, batch)
    assert not compilations
    assert_same(found, expected)
    assert_same(compiled(make_params(), batch), expected)


def test_the_function_is_traced_once() -> None:
    calls = []

    def fun(x: jax.Array) -> jax.Array:
        calls.append(x.shape)
        return x + 1

    step = autopar.parallelize(fun)
    step.plan(jnp.ones(8))
    step.lower(jnp.ones(8)).compile()
    step(step(jnp.ones(8)))
    assert calls == [(8,)]


def test_a_plan_needs_shapes_only() -> None:
    step = autopar.parallelize(sgd_step)
    shapes = jax.eval_shape(lambda: (make_params(), make_batch()))
    assert step.plan(*shapes) is step.plan(make_params(), make_batch())


def test_a_plan_for_a_cluster_that_is_not_there() -> None:
    step = autopar.parallelize(
        sgd_step, cluster=autopar.Cluster.preset("8x8xH100"), mesh="data:8;model:8"
    )
    shapes = jax.eval_shape(lambda: (make_params(), make_batch(1024)))
    plan = step.plan(*shapes)
    assert plan.sharding.mesh.size == 64
    assert plan.predicted.step_seconds > 0


def test_a_saved_plan_runs_as_it_is_and_state_stays_where_it_puts_it(
    tmp_path: Path,
) -> None:
    expected = jax.jit(sgd_step)(make_params(), make_batch())
    plan = autopar.parallelize(sgd_step, mesh="a:2;b:4").plan(
        make_params(), make_batch()
    )
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    step = autopar.parallelize(sgd_step, plan=loaded)
    assert step.plan(make_params(), make_batch()) == plan
    found = params, _ = step(make_params(), make_batch())
    assert_same(found, expected)
    sharding = params["w"].sharding
    params, _ = step(params, make_batch())
    assert params["w"].sharding == sharding
    assert sharding.mesh.devices.size == 8
