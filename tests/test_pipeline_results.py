"""What a pipelined step may return and read besides state: evaluation, constants."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests.marks import slow

from .test_pipeline import assert_equal, chain, normal


def evaluation(params: Any, x: jax.Array) -> Any:
    """No gradients: predictions, a score for each example and a mean."""
    y = x
    for w in params["w"]:
        y = jnp.tanh(y @ w)
    pairs = y.reshape(-1, 2, y.shape[1] // 2)
    return {"y": y, "pairs": pairs, "score": y.sum(1), "mean": y.mean(), "x": x}


@pytest.mark.parametrize(
    "method",
    [
        PipelineParallel(2, 4),
        slow(PipelineParallel(4, 2, "gpipe")),
    ],
)
def test_a_step_without_gradients_runs_forward_only(method: Any):
    _, params, x = chain()
    step: Any = parallelize(evaluation, method=method, batch_argnums=1)
    expected = jax.jit(evaluation)(params, x)
    compiled = step.lower(params, x).compile()
    compiled.audit().raise_if_wrong()
    assert {p.kind for p in compiled.plan.stages.programs} <= {"forward", "apply"}
    for _ in range(2):
        assert_equal(step(params, x), expected)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_evaluation_takes_the_parameters_from_where_training_keeps_them():
    fun, params, x = chain()
    method = PipelineParallel(2, 4)
    pins = {"params['w'][0]": P(None, "x"), "params['w'][3]": P("x")}
    train: Any = parallelize(fun, method=method, pins=pins)
    params, _ = train(params, x)
    step: Any = parallelize(evaluation, method=method, batch_argnums=1)
    compiled = step.lower(params, x)
    shardings = compiled.step.pipeline.program.shardings
    for i, w in enumerate(params["w"]):
        assert shardings[f"params['w'][{i}]", i // 2].is_equivalent_to(w.sharding, 2)
    assert_equal(step(params, x), jax.jit(evaluation)(jax.device_get(params), x))


def test_a_train_step_may_return_values_for_each_example():
    _, params, x = chain(num_layers=2)

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            found = evaluation(params, x)
            return jnp.square(found["y"]).mean(), found

        grads, found = jax.grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, found, (x > 0).sum()

    expected = jax.jit(step)(params, x)
    parallel = parallelize(step, method=PipelineParallel(2, 4), batch_argnums=1)
    assert_equal(parallel(params, x), expected)


@pytest.mark.parametrize("schedule", ["1f1b", slow("zb_h1")])
def test_a_gradient_of_the_input_makes_the_input_state(schedule: Any):
    """Work on state is done for the whole batch, and a microbatch slices residuals.

    The slices are traced behind all forward work, but belong to every stage.
    """
    _, params, x = chain(num_layers=2)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.square(evaluation(params, x)["y"] - y).mean()

        grads, of_input = jax.grad(loss, (0, 1))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), of_input

    y = normal(7, *x.shape)
    expected = jax.jit(step)(params, x, y)
    method = PipelineParallel(2, 2, schedule)
    assert_equal(parallelize(step, method=method)(params, x, y), expected)


def test_a_step_may_close_over_arrays():
    """They lie on the stages that read them, and are moved there once."""
    table, scale = normal(5, 32, 32), jnp.arange(1.0, 33.0)

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = jnp.tanh((x @ table) @ params["w"][0])
            return ((jnp.tanh(y @ params["w"][1]) @ table) * scale).mean()

        value, grads = jax.value_and_grad(loss)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g / scale, params, grads)
        return new, value, table

    _, params, x = chain(num_layers=2)
    parallel: Any = parallelize(step, method=PipelineParallel(2, 4), batch_argnums=1)
    expected: Any = (params, None)
    got: Any = (jax.tree.map(jnp.copy, params), None)
    for _ in range(2):
        expected, got = jax.jit(step)(expected[0], x), parallel(got[0], x)
    assert_equal(got, expected)
    (pipelined,) = parallel._running()
    held = dict(pipelined.constants)
    assert held
    parallel(got[0], x)
    assert all(pipelined.constants[name] is value for name, value in held.items())


def test_results_that_no_operator_makes_are_the_right_ones():
    """Raw sums, literals, leaves under another name, and old values of new leaves."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ w) @ state["v"]).sum()

        value, grad = jax.value_and_grad(loss)(state["w"])
        new = {"w": state["w"] - 0.1 * grad, "v": state["v"], "old": state["w"]}
        return new, value, x.sum(0), jnp.ones(3), state["v"], state["w"]

    state = {"w": normal(0, 16, 16), "v": normal(1, 16, 4), "old": jnp.zeros((16, 16))}
    x = normal(2, 16, 16)
    expected = jax.jit(step)(state, x)
    method = PipelineParallel(2, 4)
    got = parallelize(step, method=method, batch_argnums=1)(state, x)
    assert_equal(got, expected)


def test_work_on_all_examples_behind_the_loop_is_refused():
    def step(w: jax.Array, x: jax.Array) -> Any:
        y = jnp.tanh(x @ w) @ w
        return jnp.sort(y, axis=0)

    parallel = parallelize(step, method=PipelineParallel(2, 2), batch_argnums=1)
    with pytest.raises(NotImplementedError, match=r"'sort.* does with dot_general"):
        parallel(normal(0, 8, 8), normal(1, 16, 8))


def test_state_that_is_not_donated_stays():
    fun, params, x = chain(num_layers=2)
    step: Any = parallelize(fun, method=PipelineParallel(2, 4), donate_argnums=())
    first, _ = step(params, x)
    second = [step(first, x) for _ in range(2)]
    assert_equal(*second)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    donating: Any = parallelize(fun, method=PipelineParallel(2, 4))
    donating(first, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))


def test_stages_have_the_settings_of_the_call() -> None:
    """Their threads make the zeros of sums, of 64 bits under `jax.enable_x64`."""

    def train(w: list[jax.Array], x: jax.Array) -> Any:
        def loss(w: list[jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value.astype(float)

    args = [jnp.ones((4, 8)), jnp.ones((8, 4))], jnp.ones((8, 4))
    step = parallelize(train, method=PipelineParallel(2, 2), donate_argnums=())
    for is_double in (False, True):
        with jax.enable_x64(is_double):
            ours, theirs = step(*args), jax.jit(train)(*args)
        assert ours[1].dtype == theirs[1].dtype
        assert ours[1].dtype == (jnp.float64 if is_double else jnp.float32)
        assert_equal(ours, theirs)
