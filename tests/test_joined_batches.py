"""Batches that are joined along their examples, as chosen and rejected answers are."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.errors import FallbackWarning
from autopar.methods.methods import PipelineParallel
from autopar.microbatches.microbatches import BatchCoupledError
from tests.rows.fixtures import random

Loss = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


def network(params: Any, x: jax.Array) -> jax.Array:
    def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ w), None

    return jax.lax.scan(layer, jnp.tanh(x @ params["first"]), params["layers"])[0]


def preference(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    made = network(params, jnp.concatenate([x, y]))
    margin = (made[: len(x)] - made[len(x) :]).sum(-1)
    return -jax.nn.log_sigmoid(margin).mean(), (margin, made)


def three_parts(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    made = network(params, jnp.concatenate([x, y, x * y]))
    one, two = jnp.split(made, [2 * len(x)])
    return jnp.square(one).mean() + (two**3).mean(), one.sum(-1)


def discriminator(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    made = network(params, jnp.concatenate([x, y]))[:, 0]
    is_real = jnp.concatenate([jnp.ones(len(x)), jnp.zeros(len(y))])
    return jnp.square(made - is_real).mean(), (made > 0.5) == (is_real > 0)


def quick(*losses: Loss) -> list[Any]:
    """All of them, of which the others are slow."""
    return [
        pytest.param(loss, marks=() if loss in losses else pytest.mark.slow)
        for loss in (preference, three_parts, discriminator)
    ]


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        found = jax.value_and_grad(loss, has_aux=True)
        (value, made), grads = found(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, made

    return step


def arguments() -> tuple[Any, jax.Array, jax.Array]:
    params = {
        "first": random(1, 16, 16, scale=0.3),
        "layers": random(2, 2, 16, 16, scale=0.3),
    }
    return params, random(3, 8, 16), random(4, 8, 16)


def assert_runs_as_on_one_device(step: Callable[..., Any], **options: Any) -> None:
    params, x, y = arguments()
    expected = jax.jit(step)(params, x, y)
    got = parallelize(step, **options)(params, x, y)
    for want, made in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", quick(three_parts))
def test_microbatches_hold_a_part_of_each_batch(loss: Loss) -> None:
    """A warning would say that all of it is run at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert_runs_as_on_one_device(step_of(loss), num_microbatches=4, mesh="x:8")


@pytest.mark.parametrize("loss", quick(discriminator))
def test_joined_batches_go_through_a_pipeline(loss: Loss) -> None:
    assert_runs_as_on_one_device(step_of(loss), method=PipelineParallel(2, 2))


def test_what_mixes_the_batches_is_refused() -> None:
    """Products of all with all."""

    def contrast(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        made = network(params, jnp.concatenate([x, y]))
        return jax.nn.logsumexp(made @ made.T, axis=-1).mean(), None

    with pytest.raises(BatchCoupledError, match="To keep these values"):
        assert_runs_as_on_one_device(step_of(contrast), num_microbatches=4, mesh="x:8")


def test_parts_of_a_batch_are_no_batches() -> None:
    """The first quarter of the joined ones lies in every microbatch."""

    def quarter(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        made = network(params, jnp.concatenate([x, y]))
        return jnp.square(made[:4]).mean() + (made[4:12] ** 3).mean(), None

    with pytest.raises(BatchCoupledError, match="To keep these values"):
        assert_runs_as_on_one_device(step_of(quarter), num_microbatches=4, mesh="x:8")
