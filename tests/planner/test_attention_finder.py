"""Attention is found however it is written, and nothing else is taken for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import autopar
from autopar.attention.finder import find_attention
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner.attention_trace import with_attention
from autopar.planner.whole_step import roles_of
from tests.marks import slow
from tests.rows.fixtures import random

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
TRIANGLE = np.tri(8, dtype=bool)


def softmax_attention(
    change: Callable[[jax.Array], jax.Array] = lambda scores: scores,
    change_weights: Callable[[jax.Array], jax.Array] = lambda weights: weights,
    softmax: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
) -> Attention:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2)
        weights = change_weights(softmax(scores))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return attention


def by_matmul(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def by_hand(scores: jax.Array) -> jax.Array:
    shifted = jnp.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def causal(scores: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(mask, scores, -jnp.inf)


def in_a_loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """With a mask that is made before the loop."""
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    layer = softmax_attention(lambda x: jnp.where(mask, x, -1e9))

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return layer(x, k, v), None

    return jax.lax.scan(jax.checkpoint(body), q, None, length=2)[0]


def dropped(weights: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape)
    return jnp.where(keep, weights / 0.8, 0.0)


def halved_gradient(scores: jax.Array) -> jax.Array:
    return 0.5 * scores + 0.5 * jax.lax.stop_gradient(scores)


@jax.custom_vjp
def clipped(scores: jax.Array) -> jax.Array:
    """Limited to 50, with the gradient of what is not limited."""
    return jnp.clip(scores, -50, 50)


clipped.defvjp(lambda scores: (clipped(scores), None), lambda _, dy: (dy,))


ATTENTIONS = {
    "plain": softmax_attention(),
    "causal": softmax_attention(causal),
    "added mask": softmax_attention(lambda x: x + jnp.where(TRIANGLE, 0.0, -1e9)),
    "by hand": softmax_attention(softmax=by_hand),
    "matmul": by_matmul,
    "recomputed": jax.checkpoint(softmax_attention(causal)),
    "in a loop": in_a_loop,
    "jax.nn": jax.nn.dot_product_attention,
}
OTHERS = {
    "capped": softmax_attention(lambda x: 5 * jnp.tanh(x / 5)),
    "dropout": softmax_attention(change_weights=dropped),
    "weights squared": softmax_attention(change_weights=jnp.square),
    "normed": softmax_attention(lambda x: x - x.mean(-1, keepdims=True)),
    "doubled softmax": softmax_attention(change_weights=jax.nn.softmax),
    "other gradient": softmax_attention(halved_gradient),
    "other gradient of large scores": softmax_attention(clipped),
    "other softmax of large scores": softmax_attention(
        softmax=lambda x: jnp.maximum(jax.nn.softmax(x), 1e-12)
    ),
    "no softmax": softmax_attention(softmax=jax.nn.sigmoid),
}


def with_gradients(attention: Attention) -> Callable[..., Any]:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(attention, q, k, v)
        return y, *backward(dy.reshape(y.shape))

    return step


def found_in(function: Callable[..., Any], arguments: list[jax.Array]) -> Any:
    traced = trace(function, arguments, {})
    graph = build_graph(traced, roles_of(traced))
    return traced, graph, find_attention(traced, graph)[0]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("plain", 1),
        ("jax.nn", 1),
        *((name, 2) for name in ATTENTIONS),
        *(slow(name, 1) for name in ATTENTIONS if name not in ("plain", "jax.nn")),
    ],
)
def test_attention_as_one_operator_is_the_same(name: str, batch: int) -> None:
    arguments = [random(i, batch, 8, 3, 4) for i in range(4)]
    traced, graph, found = found_in(with_gradients(ATTENTIONS[name]), arguments)
    assert found
    fused = with_attention(traced, graph, found)
    assert not any(eqn.primitive.name == "exp" for eqn in fused.jaxpr.jaxpr.eqns)
    for got, want in zip(
        jax.jit(jaxpr_as_fun(fused.jaxpr))(*arguments),
        jax.jit(jaxpr_as_fun(traced.jaxpr))(*arguments),
        strict=True,
    ):
        scale = np.abs(want).max()
        np.testing.assert_allclose(got / scale, want / scale, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_is_left_alone(name: str) -> None:
    arguments = [random(i, 2, 8, 3, 4) for i in range(4)]
    assert not found_in(with_gradients(OTHERS[name]), arguments)[2]


def test_weights_that_are_returned_are_left_alone() -> None:
    def shown(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights

    assert not found_in(shown, [random(i, 2, 8, 3, 4) for i in range(3)])[2]


def test_a_step_that_closes_over_a_key_is_looked_through() -> None:
    key = jax.random.key(3)
    step = autopar.parallelize(lambda x: x * jax.random.uniform(key, (64,)))
    np.testing.assert_allclose(
        step(jnp.ones(64)), jax.random.uniform(key, (64,)), rtol=1e-6
    )
