"""Side effects happen once a call, with whole values, or are refused with a remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from tests.marks import slow
from tests.rules.strategy_oracle import random_array

MESHES = ["x:8", "x:2;y:4"]
X = random_array(8, 16)
W = random_array(16, 8, seed=1)


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    jax.effects_barrier()
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_print_shows_whole_values_once(
    mesh: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        loss = (x @ w).sum()
        jax.debug.print(
            "columns {s} first {a:.3f} loss {b:.2f}", s=x.shape[1], a=x[-1, -1], b=loss
        )
        return loss

    parallel = autopar.parallelize(step, mesh=mesh)
    expected = f"columns 16 first {X[-1, -1]:.3f} loss {(X @ W).sum():.2f}"
    for _ in range(2):
        jax.block_until_ready(parallel(X, W))
        assert printed(capfd) == [expected]
    parallel.lower(X, W).compile().audit().raise_if_wrong()


def test_a_callback_gets_the_whole_array_once() -> None:
    seen: list[np.ndarray] = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(np.array(value)), x * 2)
        return x.sum()

    autopar.parallelize(step, mesh="x:8")(X).block_until_ready()
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], X * 2)


def test_a_print_whose_values_nothing_else_needs_stays() -> None:
    seen: list[float] = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), jnp.abs(x).max())
        return x + 1

    autopar.parallelize(step, mesh="x:8")(X).block_until_ready()
    jax.effects_barrier()
    assert seen == [np.abs(X).max()]


def test_prints_in_loops_branches_and_gradients(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def layer(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        jax.debug.print("layer {i} {s:.2f}", i=index, s=x.sum())
        x = jax.lax.cond(index == 1, noisy, lambda x: x, x)
        return jnp.tanh(x), None

    def noisy(x: jax.Array) -> jax.Array:
        jax.debug.print("one")
        return x * 2

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, jnp.arange(3))[0].sum()

    def run(function: object, x: np.ndarray) -> tuple[list[str], np.ndarray]:
        value = function(x)  # type: ignore[operator]
        jax.block_until_ready(value)
        return sorted(printed(capfd)), np.asarray(value)

    gradient = jax.grad(loss)
    expected, value = run(jax.jit(gradient), X)
    found, parallel_value = run(autopar.parallelize(gradient, mesh="x:2;y:4"), X)
    assert found == expected and len(found) == 4
    np.testing.assert_allclose(parallel_value, value, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", [slow("float32"), slow("int32"), "bool", "bfloat16"])
def test_an_io_callback_is_called_once_and_its_result_is_everywhere(dtype: str) -> None:
    calls: list[int] = []

    def read(value: np.ndarray) -> np.ndarray:
        calls.append(len(calls))
        drawn = np.random.default_rng(len(calls)).normal(size=(8, 16)) * 10
        return (drawn + value).astype(jnp.dtype(dtype))

    def step(x: jax.Array) -> jax.Array:
        kind = jax.ShapeDtypeStruct((8, 16), jnp.dtype(dtype))
        drawn = io_callback(read, kind, x[0, 0], ordered=False)
        return drawn.astype(jnp.float32) * 2 + x

    compiled = autopar.parallelize(step, mesh="x:2;y:4")
    first, second = jax.block_until_ready((compiled(X), compiled(X)))
    assert calls == [0, 1]
    for call, result in enumerate([first, second]):
        drawn = np.random.default_rng(call + 1).normal(size=(8, 16)) * 10 + X[0, 0]
        expected = drawn.astype(jnp.dtype(dtype)).astype(np.float32) * 2 + X
        np.testing.assert_allclose(result, expected, 1e-5, 1e-5)
    compiled.lower(X).compile().audit().raise_if_wrong()


def test_stateful_random_numbers_are_one_draw() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.rng_uniform(0.0, 1.0, (8, 16)) + 0 * x

    drawn = autopar.parallelize(step, mesh="x:8")(X)
    shards = [shard.data for shard in drawn.addressable_shards]
    assert np.all((drawn >= 0) & (drawn < 1)) and shards
    whole = autopar.parallelize(step, mesh="x:8").plan(X)
    assert whole.sharding.operators[0].factors == ("once",)


@pytest.mark.filterwarnings("ignore::autopar.FallbackWarning")
def test_a_pure_callback_gets_whole_operands() -> None:
    shapes: set[tuple[int, ...]] = set()

    def host(value: np.ndarray) -> np.ndarray:
        shapes.add(value.shape)
        return np.cumsum(value, 0)

    def step(x: jax.Array) -> jax.Array:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    result = autopar.parallelize(step, mesh="x:8")(X)
    np.testing.assert_allclose(result, np.cumsum(X, 0) * 2, 1e-5)
    assert shapes == {X.shape}


def ordered_print(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def ordered_io(x: jax.Array) -> jax.Array:
    return io_callback(lambda value: value, x, x, ordered=True)


@pytest.mark.parametrize("step", [ordered_print, ordered_io])
def test_ordered_effects_are_refused_with_line_and_remedy(step: object) -> None:
    in_scan = lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, length=2)[0]  # type: ignore[operator]  # noqa: E731
    for function in (step, in_scan):
        with pytest.raises(NotImplementedError) as caught:
            autopar.parallelize(function, mesh="x:8")(X)
        text = str(caught.value)
        assert "test_side_effects.py" in text and "ordered=False" in text


def test_mutable_refs_are_refused() -> None:
    def step(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0, 0] = 1.0
        return ref[...]

    with pytest.raises(NotImplementedError, match=r"Ref.*return its next value"):
        autopar.parallelize(step, mesh="x:8")(X)
