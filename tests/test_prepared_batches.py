"""Examples that are mixed with each other are, once a step, before a pipeline runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests import random_arrays
from tests.marks import slow

normal = partial(random_arrays.normal, scale=0.3)

SHIFT = jnp.float32(0.25)  # closed over


def mixed(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
    """Each example with the one opposite, as a key says (Zhang et al. 2017)."""
    share = jax.random.beta(key, 0.4, 0.4)
    return tuple(share * each + (1 - share) * each[::-1] for each in (x, y))


def permuted(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
    """Each example with one that a key draws."""
    other = jax.random.permutation(key, len(x))
    return tuple(0.3 * each + 0.7 * each[other] for each in (x, y))


def scaled(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
    """Mixed by a parameter that is trained, and shifted by a constant array."""
    return 0.3 * x + 0.7 * x[::-1] * params["scale"] + SHIFT, y


def centred(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
    """Less the mean of the batch, as parameters that are not trained scale it."""
    return x - (x * jax.lax.stop_gradient(params["scale"])).mean(0), y


def training(mix: Any) -> Any:
    def step(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            z, wanted = mix(params, x, y, key)
            for w in params["w"]:
                z = jnp.tanh(z @ w)
            return jnp.square(z - wanted).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments() -> Any:
    params = {"w": [normal(i, 32, 32) for i in range(2)], "scale": jnp.float32(0.9)}
    return params, normal(7, 16, 32), normal(8, 16, 32), jax.random.key(3)


def assert_close(got: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mix",
    [
        permuted,
        centred,
        *(slow(m) for m in (mixed, scaled)),
    ],
)
def test_values_are_those_of_the_whole_batch(mix: Any) -> None:
    fun = training(mix)
    step: Any = parallelize(fun, method=PipelineParallel(2, 4))
    params, *batch = arguments()
    expected = params = jax.tree.map(jnp.copy, params), None
    for _ in range(2):  # the second begins with parameters that lie on stages
        expected = jax.jit(fun)(expected[0], *batch)
        params = step(params[0], *batch)
    assert_close(params, expected)
    (pipelined,) = step._running()
    assert pipelined.pipeline.parts.prepared
    assert all(each.ok for each in pipelined.pipeline.audit())


def test_leaves_go_to_where_the_batch_lies() -> None:
    fun = training(scaled)
    step: Any = parallelize(fun, method=PipelineParallel(2, 4), donate_argnums=())
    params, x, y, key = arguments()
    expected = jax.jit(fun)(params, x, y, key)
    x, y = (
        jax.device_put(each, NamedSharding(jax.make_mesh((8,), ("d",)), P("d")))
        for each in (x, y)
    )
    params["scale"] = jax.device_put(params["scale"], jax.devices()[5])
    assert_close(step(params, x, y, key), expected)
