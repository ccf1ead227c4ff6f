"""Microbatches: values of the whole batch, one reduction a step, clear refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.errors import FallbackWarning
from autopar.microbatches.microbatches import BatchCoupledError
from autopar.sharding.pin_primitive import pin
from benchmarks.models import build
from tests.marks import slow

from .rows.running import run_as_planned


def linear_step(weights: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], Any]:
    def loss(weights: dict[str, Any]) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ weights["w"]) @ weights["w"]))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def linear_arguments(batch: int = 64) -> tuple[dict[str, Any], jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return (
        {"w": jax.random.normal(keys[0], (64, 64)) / 8},
        jax.random.normal(keys[1], (batch, 64)),
    )


@pytest.mark.parametrize(
    "num_microbatches",
    [4, *(slow(n) for n in (1, 2, 8))],
)
def test_mtf_8_gradients_do_not_depend_on_the_number_of_microbatches(num_microbatches):
    weights, x = linear_arguments()
    step = parallelize(linear_step, mesh="x:8", num_microbatches=num_microbatches)
    run_as_planned(step, weights, x)


def test_a_masked_mean_counts_its_tokens_before_the_loop():
    def step(w, tokens):
        def loss(w):
            mask = (tokens > 0).astype(jnp.float32)
            values = jnp.square(w[tokens]).sum(-1)
            return (values * mask).sum() / mask.sum()

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    tokens = jax.random.randint(jax.random.key(1), (16, 8), 0, 32)
    w = jax.random.normal(jax.random.key(2), (32, 16))
    run_as_planned(
        parallelize(step, mesh="x:8", num_microbatches=2, batch_argnums=1), w, tokens
    )


def test_outputs_for_each_example_keep_their_order():
    def fun(w, x):
        hidden = jnp.tanh(x.reshape(-1, 8) @ w)  # [batch * 4, 16]: grains of four
        return w + hidden.mean(), hidden, hidden.reshape(x.shape[0], -1).sum(-1)

    w = jax.random.normal(jax.random.key(0), (8, 16))
    x = jax.random.normal(jax.random.key(1), (32, 4, 8))
    step = parallelize(fun, mesh="x:2;y:4", num_microbatches=4, batch_argnums=1)
    compiled = step.lower(w, x).compile()
    compiled.audit().raise_if_wrong()
    expected = jax.jit(fun)(w, x)
    for got, want in zip(compiled(w, x), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_callback_sees_the_examples_of_all_microbatches_at_once():
    seen: list[tuple[int, ...]] = []

    def step(w, x):
        def loss(w):
            y = jnp.tanh(x @ w)
            jax.debug.callback(lambda each: seen.append(each.shape), y.sum(1))
            return jnp.square(y).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    x = jax.random.normal(jax.random.key(0), (16, 8))
    cut = parallelize(step, mesh="x:8", num_microbatches=2, batch_argnums=1)
    jax.block_until_ready(cut(jnp.ones((8, 4)), x))
    jax.effects_barrier()
    assert seen == [(16,)]


def test_a_flag_that_a_loop_carries_beside_examples_is_returned():
    def step(w, x, flag):
        def layer(carry, w):
            flag, y = carry
            return (~flag, jnp.tanh(y @ w)), None

        def loss(w):
            (after, y), _ = jax.lax.scan(layer, (flag, x), w)
            return jnp.square(y).mean(), after

        (value, after), grad = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grad, value, after

    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (2, 8, 8)) / 3
    x = jax.random.normal(keys[1], (16, 8))
    cut = parallelize(step, mesh="x:8", num_microbatches=2, batch_argnums=1)
    run_as_planned(cut, w, x, jnp.array(True))


def test_rows_chosen_by_position_along_the_batch_are_not_cut():
    def step(w, x):
        shuffled = x[::-1] + jnp.arange(x.shape[0])[:, None]
        return w - (shuffled @ w).mean() * w, x.sum()

    w, x = jnp.eye(8), jax.random.normal(jax.random.key(1), (16, 8))
    parallel = parallelize(step, mesh="x:8", num_microbatches=2, batch_argnums=1)
    with pytest.warns(FallbackWarning, match=r"whole batch.*spare no memory"):
        run_as_planned(parallel, w, x)


def test_layers_that_are_made_again_drop_what_they_drop_in_the_whole_batch():
    def step(w, x, key):
        def loss(w):
            @jax.checkpoint
            def layer(y, each):
                kernel, key = each
                y = jnp.tanh(y @ kernel)
                return jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y, 0), None

            y, _ = jax.lax.scan(layer, x, (w, jax.random.split(key, len(w))))
            return jnp.square(y).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad / jnp.linalg.norm(grad), value

    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (2, 8, 8)) / 3
    x = jax.random.normal(keys[1], (16, 8))
    cut = parallelize(step, mesh="x:8", num_microbatches=2, batch_argnums=1)
    run_as_planned(cut, w, x, jax.random.key(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bert", "lstm"])
def test_whole_state_equals_the_full_batch_step(name):
    options: dict[str, Any] = {"gpt": dict(scan_layers=True, remat=True, dropout=0.1)}
    workload = build(name, optimizer="adamw_clip", **options.get(name, {}))
    state = workload.init(jax.random.key(0))
    batch = workload.make_batch(0)
    expected, metrics = jax.jit(workload.step)(state, batch)
    step = parallelize(workload.step, mesh="x:8", num_microbatches=4)
    compiled = step.lower(state, batch).compile()
    compiled.audit().raise_if_wrong()
    got, got_metrics = compiled(state, batch)
    np.testing.assert_allclose(got_metrics["loss"], metrics["loss"], rtol=1e-5)
    moments = optax.tree_utils.tree_get(got.opt_state, "mu")
    expected_moments = optax.tree_utils.tree_get(expected.opt_state, "mu")
    for a, b in zip(
        jax.tree.leaves(moments), jax.tree.leaves(expected_moments), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_batch_norm_in_training_is_refused_with_its_source_line():
    def batch_norm(y):
        return (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)

    def fun(w, x):
        return w - jax.grad(lambda w: jnp.square(batch_norm(x @ w)).mean())(w)

    step = parallelize(fun, mesh="x:8", num_microbatches=2, batch_argnums=1)
    with pytest.raises(
        BatchCoupledError,
        match=r"test_microbatches\.py:\d+.*batch_norm.*batch_argnums",
    ):
        step.plan(jnp.eye(8), jnp.ones((16, 8)))


def test_a_frozen_model_of_many_leaves_is_not_the_batch():
    """As in fine-tuning, distillation and DPO: most leaves begin with its width."""

    def step(weights, frozen, batch):
        def loss(weights):
            hidden = jnp.tanh(batch["x"] @ frozen["up"] + frozen["bias"])
            return ((hidden @ (frozen["square"] + weights)).mean(-1) - batch["y"]) ** 2

        grads = jax.grad(lambda weights: loss(weights).mean())(weights)
        return weights - 0.1 * grads, loss(weights).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    frozen = {
        "up": jax.random.normal(keys[0], (8, 64)),
        "square": jax.random.normal(keys[1], (64, 64)) / 8,
        "bias": jnp.ones(64),
        "unused": jnp.ones((16, 3)),  # as many as there are examples
    }
    x, y = jax.random.normal(keys[2], (16, 8)), jax.random.normal(keys[3], (16,))
    given = jnp.zeros((64, 64)), frozen, {"x": x, "y": y}
    parallel = parallelize(step, mesh="x:8", num_microbatches=2)
    inputs = parallel.plan(*given).sharding.inputs
    assert [i.path for i in inputs if i.role == "batch"] == ["batch['x']", "batch['y']"]


def test_an_indivisible_batch_names_the_nearest_numbers_that_divide():
    weights, x = linear_arguments(batch=30)
    step = parallelize(linear_step, mesh="x:1", num_microbatches=8)
    with pytest.raises(ValueError, match=r"batch size 30, but got 8; use 6 or 10"):
        step.plan(weights, x)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_the_number_of_microbatches_is_a_positive_whole_number(wrong):
    with pytest.raises(ValueError, match="whole number from 1 up"):
        parallelize(linear_step, num_microbatches=wrong)


def test_a_pin_inside_the_step_holds_in_every_microbatch():
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(pin(x @ w, P(None, "x")) @ w).sum()

    w, x = jnp.eye(8) / 2, jax.random.normal(jax.random.key(1), (16, 8))
    step = parallelize(fun, mesh="x:8", num_microbatches=2, batch_argnums=1)
    sharding = step.plan(w, x).sharding
    (pinned,) = [op for op in sharding.operators if op.kind == "autopar_pin"]
    assert pinned.result_specs == ((1,),)


def test_a_mask_that_several_read_is_not_made_for_the_whole_batch():
    def step(w, x):
        def loss(w):
            scores = jnp.einsum("bsh,hk,btk->bst", x, w, x)
            mask = jnp.tril(jnp.ones((8, 8), bool))
            masked = jnp.where(mask, scores, -1e9)  # and again for the gradient
            return jnp.mean(jax.nn.softmax(masked) * jnp.where(mask, 1.0, scores))

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    w, x = jax.random.normal(jax.random.key(0), (4, 4)), jnp.ones((32, 8, 4))
    step = parallelize(step, mesh="x:8", num_microbatches=4, batch_argnums=1)
    lowered: Any = step.lower(w, x)
    graph = lowered.graph
    outside = [t.type.shape for t in graph.tensors if t.block == 0]
    assert (32, 8, 8) not in outside
    inside = [t.type.shape for t in graph.tensors if t.block != 0]
    assert (8, 8, 8) in inside
