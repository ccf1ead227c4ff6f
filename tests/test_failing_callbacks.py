"""A host callback that fails ends its step at once, and only that step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.graph.op_graph import TensorType
from autopar.rules.host_calls import HostCalls
from tests.rules.strategy_oracle import random_array

X = random_array(8, 16)
W = random_array(16, 8, seed=1)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class DiskFull(Exception):
    """What a user's own callback may raise."""


def full(value: Any) -> Any:
    if value > 0:
        raise DiskFull("no space left")
    return np.float32(0)


def called(x: jax.Array) -> Any:
    jax.debug.callback(full, x)
    return 0


def called_in_a_scan(x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, _: (c + called(x), None), 0, length=3)[0]


def printed(x: jax.Array) -> Any:
    jax.debug.print("{:.2f}", jnp.stack([x, x]))  # no array has such a format
    return 0


def read(x: jax.Array) -> Any:
    return io_callback(full, SCALAR, x)


def read_wrongly(x: jax.Array) -> Any:
    return io_callback(lambda value: np.zeros(3, "f"), SCALAR, x)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (called, DiskFull),
        (called_in_a_scan, DiskFull),
        (printed, TypeError),
        (read, DiskFull),
        (read_wrongly, TypeError),
    ],
)
def test_the_step_raises_what_a_callback_raised(
    call: Callable[[jax.Array], Any], error: type[Exception]
) -> None:
    """The devices that do not call still meet in the sum behind the call."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sin(x @ w)
        return (y + call(jnp.abs(y).sum())).sum()

    parallel = autopar.parallelize(step, mesh="x:8")
    for run in (parallel, parallel, parallel.lower(X, W).compile()):
        with pytest.raises(error) as caught:
            run(X, W)
        assert "test_failing_callbacks.py" in "".join(caught.value.__notes__)


def test_a_step_that_failed_can_be_run_again() -> None:
    def step(x: jax.Array) -> jax.Array:
        called(x.sum())
        return x.sum() + read(x.sum())

    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    with pytest.raises(DiskFull):
        parallel(np.ones((8, 8), np.float32))
    assert parallel(-np.ones((8, 8), np.float32)) == -64


def test_no_callback_is_made_with_what_a_failed_one_did_not_give() -> None:
    seen: list[float] = []

    def step(x: jax.Array) -> jax.Array:
        y = read(x.sum())
        jax.debug.callback(lambda value: seen.append(float(value)), y)
        return y

    parallel = autopar.parallelize(step, mesh="x:8")
    with pytest.raises(DiskFull):
        parallel(X * 0 + 1)
    assert not seen
    parallel(X * 0)
    assert seen == [0.0]


def test_a_step_without_results_raises_too() -> None:
    with pytest.raises(DiskFull):
        autopar.parallelize(lambda x: called(x.sum()) and None, mesh="x:8")(X * 0 + 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [(read, DiskFull, "no space"), (called, NotImplementedError, "return its op")],
)
def test_a_stage_raises_too_and_calls_that_it_would_lose_are_refused(
    call: Callable[[jax.Array], Any], error: type[Exception], text: str
) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean()

        value, slope = jax.value_and_grad(loss)(w)
        return w - slope, value + call(value)

    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    with pytest.raises(error, match=text):
        autopar.parallelize(step, method=method)(random_array(2, 16, 16), X)


def test_outside_of_a_watched_step_an_exception_is_jaxs() -> None:
    kind = TensorType((), np.dtype("float32"))
    guarded = HostCalls().guarded(full, (kind,), "here")
    with pytest.raises(DiskFull):
        guarded(np.float32(1))
    calls = HostCalls()
    zero = calls.guarded(lambda value: [full(value)], (kind,), "here")
    with pytest.raises(DiskFull, match="no space"):
        calls.watch(lambda: zero(np.float32(1)))
    assert calls.watch(lambda: zero(np.float32(-1))) == [0]
