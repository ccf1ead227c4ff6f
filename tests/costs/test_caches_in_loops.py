"""Caches that go through a loop over layers, and where they lie meanwhile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lowering.memory_use import MemoryUse
from tests.marks import slow

Cache = dict[str, jax.Array]
Results = tuple[Any, Cache]

LAYERS, BATCH, LENGTH, WIDTH = 4, 16, 64, 32
WEIGHTS = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
X = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
CACHE = {
    name: jax.random.normal(jax.random.key(k), (LAYERS, BATCH, LENGTH, WIDTH))
    for k, name in enumerate("kv", 2)
}
CACHE_BYTES = sum(each.nbytes for each in CACHE.values()) // 8


def layer(
    w: jax.Array, x: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    new = jnp.tanh(x @ w)[:, None]
    k = lax.dynamic_update_slice(k, new, (0, at, 0))
    v = lax.dynamic_update_slice(v, 2 * new, (0, at, 0))
    scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, k))
    return x + jnp.einsum("bs,bsd->bd", scores, v), k, v


def along_layers(w: jax.Array, cache: Cache, x: jax.Array, at: jax.Array) -> Results:
    def body(x: jax.Array, own: tuple[jax.Array, ...]) -> Any:
        w, k, v = own
        x, k, v = layer(w, x, k, v, at)
        return x, (k, v)

    x, (k, v) = lax.scan(body, x, (w, cache["k"], cache["v"]))
    return x, {"k": k, "v": v}


def read_afterwards(w: jax.Array, cache: Cache, x: jax.Array, at: jax.Array) -> Results:
    x, cache = along_layers(w, cache, x, at)
    return x + cache["k"].sum((0, 2)), cache


def token_by_token(w: jax.Array, cache: Cache, x: jax.Array, at: jax.Array) -> Results:
    def body(carry: Any, _: None) -> Any:
        x, cache, at = carry
        x, cache = along_layers(w, cache, x, at)
        return (x, cache, at + 1), x

    (_, cache, _), tokens = lax.scan(body, (x, cache, at), length=4)
    return tokens, cache


def carried(w: jax.Array, cache: Cache, x: jax.Array, at: jax.Array) -> Results:
    def body(i: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        x, cache = carry
        x, k, v = layer(w[i], x, cache["k"][i], cache["v"][i], at)
        return x, {"k": cache["k"].at[i].set(k), "v": cache["v"].at[i].set(v)}

    return lax.fori_loop(0, LAYERS, body, (x, cache))


def stacked_again(w: jax.Array, cache: Cache, x: jax.Array, at: jax.Array) -> Results:
    layers = [(cache["k"][i], cache["v"][i]) for i in range(LAYERS)]

    def body(carry: Any, _: None) -> Any:
        x, layers, at = carry
        new: list[tuple[jax.Array, jax.Array]] = []
        for own, (k, v) in zip(w, layers, strict=True):
            x, k, v = layer(own, x, k, v, at)
            new.append((k, v))
        return (x, new, at + 1), x

    (_, layers, _), tokens = lax.scan(body, (x, layers, at), length=4)
    k, v = (jnp.stack(each) for each in zip(*layers, strict=True))
    return tokens, {"k": k, "v": v}


STEPS = (
    (along_layers, 2, 1.35),
    (read_afterwards, 2, 1.35),
    (token_by_token, 2, 1.35),
    (carried, 1, 1.35),
    (stacked_again, 2, 1.6),
)


@pytest.mark.parametrize(
    ("step", "copies", "most", "donate_argnums"),
    [
        *((*each, "auto") for each in STEPS),
        (*STEPS[0], (1,)),
        *(slow(*each, (1,)) for each in STEPS[1:]),
    ],
)
def test_a_cache_is_told_as_often_as_it_lies_there(
    step: Callable[..., Results], copies: int, most: float, donate_argnums: Any
) -> None:
    """What a scan goes along is read in every iteration, so its results lie apart."""
    call = WEIGHTS, CACHE, X, jnp.int32(5)
    planned = autopar.parallelize(step, mesh="x:8", donate_argnums=donate_argnums)
    compiled = planned.lower(*call).compile()
    held = MemoryUse.of(compiled.compiled).device_bytes
    told = compiled.plan.predicted
    assert told.memory_correction == 1
    assert 0.75 < told.peak_bytes / held < most
    assert copies * CACHE_BYTES < held < (copies + 1) * CACHE_BYTES
    expected, given = jax.jit(step)(*call), jax.tree.map(jnp.copy, call)
    found = planned(*given)
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)
    _, cache = planned(WEIGHTS, found[1], X, jnp.int32(6))  # not compared, so not held
    planned(WEIGHTS, cache, X, jnp.int32(7))
    assert all(each.is_deleted() for each in jax.tree.leaves(cache))


def test_state_that_is_made_of_something_else_is_tied_where_it_is_given_away() -> None:
    def step(state: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ w)
        return state, state.sum()

    def tied(**options: Any) -> int:
        planned = autopar.parallelize(step, mesh="x:8", **options)
        return planned.plan(jnp.ones((64, 32)), jnp.eye(32)).sharding.state_bytes()

    assert tied() == 0
    assert tied(donate_argnums=(0,)) == 64 * 32 * 4 // 8
