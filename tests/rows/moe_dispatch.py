"""Mixtures of experts whose tokens are moved by index: scattered, or sorted by expert.

`by_scatter` gives every expert a buffer of fixed capacity, as GShard does, and drops
what is over it; `by_sorting` gives it as many rows as it has tokens, as MegaBlocks does
(Gale et al. 2023), and drops none. Sizes and parameters are those of `Experts`.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from tests.rows.fixtures import Case, Params, sgd
from tests.rows.moe_models import Experts

Update = Literal["add", "set"]
Layer = Callable[[Experts, Params, jax.Array], jax.Array]


def routed(layer: Experts, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights [S, top] of a group's tokens, and the experts that they are for."""
    weights, experts = jax.lax.top_k(gates, layer.top)
    return (weights / weights.sum(-1, keepdims=True) if layer.top > 1 else weights), (
        experts
    )


def places(experts: jax.Array, number: int) -> jax.Array:
    """[S, top]: how many tokens come before each at its expert, first choices first."""
    chosen = jax.nn.one_hot(experts.T.reshape(-1), number, dtype=jnp.int32)
    before = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(-1)
    return before.reshape(experts.T.shape).T


def mlp(params: Params, inputs: jax.Array) -> jax.Array:
    """Every expert on its rows: [E, C, M]."""
    hidden = jax.nn.relu(jnp.einsum("ecm,emh->ech", inputs, params["up"]))
    return jnp.einsum("ech,ehm->ecm", hidden, params["down"])


def scattered(
    layer: Experts, params: Params, x: jax.Array, update: Update = "add"
) -> jax.Array:
    """[S, M]: what the experts add to the tokens of one group."""
    weights, experts = routed(layer, jax.nn.softmax(x @ params["gate"]))
    slots = places(experts, layer.experts)
    tokens = jnp.repeat(x, layer.top, axis=0)
    at = experts.reshape(-1), slots.reshape(-1)
    buffer = jnp.zeros((layer.experts, layer.capacity, x.shape[-1]), x.dtype)
    buffer = getattr(buffer.at[at], update)(tokens, mode="drop")
    made = mlp(params, buffer).at[at].get(mode="fill", fill_value=0)
    return jnp.einsum("stm,st->sm", made.reshape(*experts.shape, -1), weights)


def by_scatter(update: Update = "add") -> Layer:
    """Tokens [G, S, M] with what the experts add; every group has its own buffers."""

    def apply(layer: Experts, params: Params, x: jax.Array) -> jax.Array:
        if len(x) == 1:
            return x + scattered(layer, params, x[0], update)[None]
        return x + grouped(layer, params, x, update)

    return apply


def grouped(
    layer: Experts, params: Params, x: jax.Array, update: Update = "add"
) -> jax.Array:
    """As `scattered` for each of G groups, which the experts work on together."""
    weights, experts = jax.vmap(lambda x: routed(layer, x))(
        jax.nn.softmax(x @ params["gate"])
    )
    slots = jax.vmap(lambda each: places(each, layer.experts))(experts)
    tokens = jnp.repeat(x, layer.top, axis=1)
    at = experts.reshape(len(x), -1), slots.reshape(len(x), -1)

    def fill(experts: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
        buffer = jnp.zeros((layer.experts, layer.capacity, x.shape[-1]), x.dtype)
        return getattr(buffer.at[experts, slots], update)(tokens, mode="drop")

    buffers = jax.vmap(fill, out_axes=1)(*at, tokens)  # [E, G, C, M]
    rows = buffers.reshape(layer.experts, -1, x.shape[-1])
    made = mlp(params, rows).reshape(buffers.shape)

    def read(made: jax.Array, experts: jax.Array, slots: jax.Array) -> jax.Array:
        return made.at[experts, slots].get(mode="fill", fill_value=0)

    rows = jax.vmap(read, in_axes=(1, 0, 0))(made, *at)
    return jnp.einsum("gstm,gst->gsm", rows.reshape(*experts.shape, -1), weights)


def by_sorting(layer: Experts, params: Params, x: jax.Array) -> jax.Array:
    """Tokens [1, S, M] with what the experts add, without any dropped."""
    (tokens,) = x
    weights, experts = routed(layer, jax.nn.softmax(tokens @ params["gate"]))
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=layer.experts)
    rows = tokens[order // layer.top]
    hidden = jax.nn.relu(jax.lax.ragged_dot(rows, params["up"], sizes))
    made = jax.lax.ragged_dot(hidden, params["down"], sizes)
    added = made * weights.reshape(-1)[order][:, None]
    return x + jnp.zeros_like(tokens).at[order // layer.top].add(added)[None]


Step = Callable[[Params, Params], tuple[Params, jax.Array, jax.Array]]


def step_of(layer: Experts, apply: Layer) -> Step:
    """One SGD step on a squared error, with the gradient for x that a stack needs."""

    def step(params: Params, batch: Params) -> tuple[Params, jax.Array, jax.Array]:
        def loss(params: Params, x: jax.Array) -> jax.Array:
            return jnp.mean((apply(layer, params, x) - batch["y"]) ** 2)

        value, (grads, x_grad) = jax.value_and_grad(loss, (0, 1))(params, batch["x"])
        return sgd(params, grads), value, x_grad

    return step


def training(layer: Experts, apply: Layer) -> Case:
    """The step with arrays."""
    return Case(step_of(layer, apply), (layer.params(), layer.batch()))
