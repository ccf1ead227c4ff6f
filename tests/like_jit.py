"""A small train step, and what it means to return the same as `jax.jit`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

Tree = Any


def sgd_step(params: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
    """One step of least squares; `params` is `{"w": [16, 8]}`."""

    def loss(params: Tree) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def make_params() -> dict[str, jax.Array]:
    return {"w": jnp.arange(128.0).reshape(16, 8) / 100}


def make_batch(size: int = 32) -> dict[str, jax.Array]:
    return {
        "x": jnp.sin(jnp.arange(size * 16.0)).reshape(size, 16),
        "y": jnp.ones((size, 8)),
    }


def assert_same(actual: Tree, expected: Tree) -> None:
    """Equal trees, shapes, dtypes, weak types and, up to rounding, values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for ours, theirs in leaves:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert is_weak(ours) == is_weak(theirs)
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(
            np.asarray(ours, np.complex64), np.asarray(theirs, np.complex64), rtol=1e-5
        )


def is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)


def assert_like_jit(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    expected = jax.jit(fun)(*args, **kwargs)
    assert_same(autopar.parallelize(fun, donate_argnums=())(*args, **kwargs), expected)


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of the functions that JAX traces or compiles meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile"):
            seen.append(f"{event} {kwargs.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
