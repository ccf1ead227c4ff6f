"""Steps that cannot be cut into stages: the text names what has no stage and a remedy,
and the remedy works."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel, ShardParallel
from autopar.microbatches.microbatches import BatchCoupledError
from tests.rows.fixtures import random
from tests.test_stage_operands import assert_like_jit


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


def weights(fan_in: int, fan_out: int) -> list[Any]:
    sizes = [fan_in, 16, 16, fan_out]
    return [random(i, *sizes[i : i + 2], scale=0.3) for i in range(3)]


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_second_derivatives_are_refused_with_what_has_no_stage():
    """A physics-informed network: the loss is the network's Laplacian."""

    def step(params: Any, x: jax.Array) -> Any:
        def laplacian(params: Any, x: jax.Array) -> jax.Array:
            return jnp.trace(jax.hessian(lambda x: perceptron(params, x)[0])(x))

        def loss(params: Any) -> jax.Array:
            return jnp.square(jax.vmap(laplacian, (None, 0))(params, x) - 1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    args = weights(2, 1), random(7, 16, 2)
    text = r"reads .* of stages \[.*autopar\.ShardParallel\(\)"
    with pytest.raises(NotImplementedError, match=text) as error:
        parallelize(step, method=PipelineParallel(2, 4)).plan(*args)
    assert "num_stages" not in str(error.value)  # no fewer than 2 stages
    assert __file__ in str(error.value)  # the line of the operator
    three = PipelineParallel(3, 4, stage_meshes=["x:2"] * 3)
    with pytest.raises(NotImplementedError, match="3 stages") as error:
        parallelize(step, method=three).plan(*args)
    assert "num_stages" not in str(error.value)  # 2 stages are refused, too
    assert parallelize(step, method=ShardParallel()).plan(*args).sharding


def test_fewer_stages_are_the_remedy_where_they_can_be_cut():
    """Only the head is differentiated twice: it must be on one stage."""

    def step(params: Any, x: jax.Array) -> Any:
        embed, *head = params

        def loss(params: Any) -> jax.Array:
            embed, *head = params
            slope = jax.vmap(jax.grad(lambda h: perceptron(head, h)[0]))
            return jnp.square(slope(jnp.tanh(x @ embed)) - 1).mean()

        value, grads = jax.value_and_grad(loss)([embed, *head])
        return sgd(params, grads), value

    head = [random(i, 16, size, scale=0.3) for i, size in enumerate((16, 16, 1))]
    params = [random(9, 256, 16, scale=0.1), *head]
    args = params, random(7, 16, 256)
    three = PipelineParallel(3, 4, stage_meshes=["x:2"] * 3)
    with pytest.raises(NotImplementedError, match=r"use num_stages=2, into which"):
        parallelize(step, method=three).plan(*args)
    assert_like_jit(step, *args, method=PipelineParallel(2, 4))


def test_members_that_keep_a_count_each_are_refused_and_one_optimizer_is_not():
    optimizer = optax.adam(1e-3)

    def grads_of(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(lambda p: jnp.square(perceptron(p, x) - y).mean())(params)

    def updated(params: Any, grads: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def apart(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.vmap(lambda p, s: updated(p, grads_of(p, x, y), s))(params, state)

    def together(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.vmap(grads_of, (0, None, None))(params, x, y)
        return updated(params, grads, state)

    members = jax.tree.map(lambda *w: jnp.stack(w), *[weights(8, 4)] * 4)
    batch = random(8, 16, 8), random(9, 16, 4)
    state = jax.vmap(optimizer.init)(members)
    method = PipelineParallel(2, 4)
    with pytest.raises(NotImplementedError, match=r"meet.*\[4.*jax\.vmap the grad"):
        parallelize(apart, method=method).plan(members, state, *batch)
    step: Any = parallelize(together, method=method)
    assert step.plan(members, optimizer.init(members), *batch).stages.num_stages == 2


def contrastive(params: Any, one: jax.Array, two: jax.Array) -> Any:
    """SimCLR: every example's negatives are all others of the batch."""

    def loss(params: Any) -> jax.Array:
        logits = perceptron(params, one) @ perceptron(params, two).T
        return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


@pytest.mark.parametrize("number", [1, 4])
def test_a_contrastive_loss_is_refused_by_pipelines_of_any_microbatches(number: int):
    args = weights(8, 4), random(7, 16, 8), random(8, 16, 8)
    text = r"dot_general.*all examples at once.*independent.*negatives"
    with pytest.raises(BatchCoupledError, match=text):
        step = parallelize(contrastive, method=PipelineParallel(2, number))
        step.plan(*args)


def test_one_independent_microbatch_keeps_a_contrastive_loss():
    params = [random(i, 8, 8, scale=0.3) for i in range(2)]
    args = params, random(7, 16, 8), random(8, 16, 8)
    method = PipelineParallel(2, 1, microbatch_semantics="independent")
    assert_like_jit(contrastive, *args, method=method)


def test_a_metric_of_pairs_is_refused_behind_the_loop_of_a_pipeline():
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            z = perceptron(params, x)
            return jnp.square(z).mean(), z

        (value, z), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads), value, jnp.abs(z[:, None] - z[None]).max()

    args = weights(8, 4), random(7, 16, 8)
    text = r"ShardParallel\(num_microbatches=4\).*one microbatch meet"
    with pytest.raises(NotImplementedError, match=text):
        parallelize(step, method=PipelineParallel(2, 4)).plan(*args)
    assert parallelize(step, method=ShardParallel(4)).plan(*args).sharding
