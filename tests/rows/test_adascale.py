"""FSC-6: AdaScale's gain under data parallelism, against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import random
from tests.rows.running import homes, run_as_planned, traffic

NUM_GROUPS, BATCH, DIM = 8, 32, 16
LEARNING_RATE = 0.05


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def train_step(optimizer: Any) -> Any:
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        grads_of = autopar.grouped_value_and_grad(loss_fn, NUM_GROUPS)
        loss, grads = grads_of(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def arguments(optimizer: Any) -> tuple[Any, ...]:
    params = {"w": random(0, DIM), "b": jnp.zeros(())}
    x, y = random(1, BATCH, DIM), random(2, BATCH)
    return params, optimizer.init(params), x, y


def device_gradients(params: Any, x: Any, y: Any) -> np.ndarray:
    """The gradient of each device's rows, flat: [NUM_GROUPS, DIM + 1]; NumPy only."""
    w, b = np.asarray(params["w"], "f8"), float(params["b"])
    found = []
    for rows, targets in zip(
        np.split(np.asarray(x, "f8"), NUM_GROUPS),
        np.split(np.asarray(y, "f8"), NUM_GROUPS),
        strict=True,
    ):
        errors = 2 * (rows @ w + b - targets) / len(targets)
        found.append(np.append(rows.T @ errors, errors.sum()))
    return np.stack(found)


def estimates(grads: np.ndarray) -> tuple[float, float]:
    """Of variance and squared mean: section 3.3 of the paper, term by term."""
    n = len(grads)
    mean_square = np.sum(grads.mean(0) ** 2)
    variance = np.sum(grads**2) / (n - 1) - n / (n - 1) * mean_square
    return variance, mean_square - variance / n


def gain_of(variance: float, squared_mean: float) -> float:
    squared_mean = max(squared_mean, 0.0)
    return (variance + squared_mean) / (variance / NUM_GROUPS + squared_mean)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    optimizer = autopar.adascale(optax.sgd(LEARNING_RATE), NUM_GROUPS, smoothing=0)
    step = autopar.parallelize(
        train_step(optimizer), mesh="data:8", method=autopar.DataParallel()
    )
    return run_as_planned(step, *arguments(optimizer))


def test_fsc_6_each_device_holds_its_own_gradient(compiled: Compiled) -> None:
    """One sum of gradients, and scalars: nothing that is as large as all groups."""
    assert homes(compiled.plan)["x"] == (0,), "rows over the data axis"
    sent = traffic(compiled.plan)
    assert {kind for kind, _ in sent} == {"all_reduce"}
    sizes = [size for found in sent.values() for size in found]
    assert max(sizes) == 4 * DIM
    assert sum(sizes) <= 4 * (DIM + 1) + 4 * 4


def test_fsc_6_gain_is_that_of_device_gradients(compiled: Compiled) -> None:
    optimizer = autopar.adascale(optax.sgd(LEARNING_RATE), NUM_GROUPS, smoothing=0)
    params, opt_state, x, y = arguments(optimizer)
    for number in range(3):
        x, y = random(10 + number, BATCH, DIM), random(20 + number, BATCH)
        grads = device_gradients(params, x, y)
        expected = gain_of(*estimates(grads))
        before = np.append(params["w"], params["b"])
        params, opt_state, _ = compiled(params, opt_state, x, y)
        assert 1 <= float(opt_state.gain) <= NUM_GROUPS
        np.testing.assert_allclose(opt_state.gain, expected, rtol=1e-4)
        np.testing.assert_allclose(
            np.append(params["w"], params["b"]),
            before - LEARNING_RATE * expected * grads.mean(0),
            rtol=1e-4,
            atol=1e-5,
        )


def test_fsc_6_equal_gradients_have_gain_one(compiled: Compiled) -> None:
    optimizer = autopar.adascale(optax.sgd(LEARNING_RATE), NUM_GROUPS, smoothing=0)
    params, opt_state, _, _ = arguments(optimizer)
    size = BATCH // NUM_GROUPS
    x, y = jnp.tile(random(3, size, DIM), (NUM_GROUPS, 1)), jnp.tile(random(4, size), 8)
    _, opt_state, _ = compiled(params, opt_state, x, y)
    np.testing.assert_allclose(opt_state.gain, 1, rtol=1e-6)


def test_fsc_6_gradients_that_only_differ_have_all_the_gain() -> None:
    optimizer = autopar.adascale(optax.sgd(1.0), 2)
    state = optimizer.init(jnp.zeros(3))
    grads = jnp.stack([jnp.ones(3), -jnp.ones(3)])
    _, state = optimizer.update(grads, state)
    assert state.gain == 2
    _, state = optimizer.update(0 * grads, optimizer.init(jnp.zeros(3)))
    assert state.gain == 1, "no gradient, no gain"


def test_fsc_6_averages_over_steps_momentum_and_schedule() -> None:
    kept = 0.9
    inner = optax.sgd(1.0, momentum=0.5)
    optimizer = autopar.adascale(
        inner, NUM_GROUPS, smoothing=kept, schedule=lambda steps: 1 / (1 + steps)
    )
    params, state, _, _ = arguments(optimizer)
    variance = squared_mean = steps = 0.0
    momentum = np.zeros(DIM + 1)
    for number in range(3):
        grads = device_gradients(params, random(number, BATCH, DIM), random(9, BATCH))
        fresh = estimates(grads)
        variance = kept * variance + (1 - kept) * fresh[0]
        squared_mean = kept * squared_mean + (1 - kept) * fresh[1]
        gain = gain_of(variance, squared_mean)
        momentum = 0.5 * momentum + grads.mean(0)
        stacked = {"w": jnp.array(grads[:, :DIM]), "b": jnp.array(grads[:, DIM])}
        updates, state = optimizer.update(stacked, state, params)
        np.testing.assert_allclose(
            np.append(updates["w"], updates["b"]),
            -gain / (1 + steps) * momentum,
            rtol=1e-4,
        )
        steps += gain
        np.testing.assert_allclose(state.gained_steps, steps, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autopar.adascale(optax.sgd(1.0), 1), "2 groups or more, but got"),
        (lambda: autopar.grouped_value_and_grad(loss_fn, 1), "2 groups or more"),
        (lambda: autopar.adascale(optax.sgd(1.0), 2, smoothing=1.0), "to below 1"),
        (
            lambda: autopar.grouped_value_and_grad(loss_fn, 3)(
                *(arguments(optax.sgd(1.0))[i] for i in (0, 2, 3))
            ),
            "3 groups of 32 examples; use a multiple",
        ),
    ],
)
def test_fsc_6_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
