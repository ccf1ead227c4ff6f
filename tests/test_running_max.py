"""Maxima over examples, made in a scan over layers, are those of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel, ShardParallel
from autopar.microbatches.extremes import start_of
from autopar.sharding.spec import MAX, MIN
from tests.marks import slow

INDEPENDENT = {"num_microbatches": 4, "microbatch_semantics": "independent"}


def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], Any]:
    def layer(carry, layer_state):
        h, highest, lowest = carry
        weights, history = layer_state
        seen = jax.lax.stop_gradient(h)
        found = jnp.max(jnp.abs(seen))
        statistics = {
            "history": jnp.roll(history, 1).at[0].set(found),
            "average": 0.9 * history + 0.1 * found,
            "negative": -found.astype(jnp.bfloat16) / 448,
            "is_large": jnp.any(seen > 1.5).astype(jnp.int32),
        }
        highest = jnp.maximum(highest, found)
        carry = jnp.tanh(h @ weights) + h, highest, jnp.minimum(lowest, seen.min())
        return carry, statistics

    def loss(weights):
        start = x, jnp.float32(-jnp.inf), jnp.inf
        carry, statistics = jax.lax.scan(layer, start, (weights, state["history"]))
        return jnp.mean(carry[0] ** 2), (carry[1:], statistics)

    found = jax.value_and_grad(loss, has_aux=True)(state["weights"])
    (value, (ends, statistics)), gradient = found
    after = {
        "weights": state["weights"] - 0.1 * gradient,
        "history": statistics["history"],
        "highest": jnp.maximum(state["highest"], ends[0]),
    }
    return after, (value, ends, statistics)


@pytest.mark.parametrize(
    "method",
    [
        slow(ShardParallel(num_microbatches=4)),
        ShardParallel(**INDEPENDENT),
        slow(PipelineParallel(num_stages=2, num_microbatches=4)),
        slow(PipelineParallel(num_stages=2, **INDEPENDENT)),
    ],
    ids=["exact", "independent", "stages", "independent stages"],
)
def test_a_maximum_over_examples_in_a_scan_over_layers_is_exact(method):
    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        "weights": jax.random.normal(keys[0], (2, 16, 16)) / 5,
        "history": jnp.ones((2, 4)),
        "highest": jnp.zeros(()),
    }
    found = expected = state
    cut = parallelize(step, method=method, donate_argnums=())
    for key in keys[1:]:
        x = jax.random.normal(key, (16, 16))
        found, values = cut(found, x)
        expected, expected_values = jax.jit(step)(expected, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-4
            ),
            (found["history"], found["highest"], values),
            (expected["history"], expected["highest"], expected_values),
        )


@pytest.mark.parametrize("dtype", ["bool", "uint8", slow("float16"), "float8_e4m3fn"])
def test_a_maximum_starts_at_the_least_value(dtype):
    dtype = jnp.dtype(dtype)
    values = jnp.asarray([0, 1], dtype)
    for reduction, join in ((MAX, jax.lax.max), (MIN, jax.lax.min)):
        assert jnp.array_equal(join(start_of(reduction, (2,), dtype), values), values)


def test_the_greatest_count_of_independent_microbatches_is_no_sum():
    def step(weights, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        lengths = (x > 0).sum(1)
        return weights - gradient, (value, lengths.max(), lengths.sum())

    weights = jnp.ones((8, 4))
    x = jax.random.normal(jax.random.key(0), (16, 8))
    cut = parallelize(step, method=ShardParallel(**INDEPENDENT), donate_argnums=())
    assert jax.device_get(cut(weights, x)[1][1:]) == jax.device_get(
        step(weights, x)[1][1:]
    )
