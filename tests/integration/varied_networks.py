"""Steps of varied networks, each as its users write it: `() -> (step, args)`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .varied_steps import Program, descend, descent_step, integers, normal, optax_step


def llama(num_layers: int = 1) -> Program:
    """Rotary positions, grouped-query attention, a gated feed-forward; momentum."""
    hidden, num_heads, num_groups, head_dim, vocabulary = 64, 8, 2, 8, 96

    def layer(seed: int) -> dict[str, jax.Array]:
        return {
            "norm_1": jnp.ones(hidden),
            "norm_2": jnp.ones(hidden),
            "query": normal(seed, hidden, num_heads * head_dim, scale=0.1),
            "key": normal(seed + 1, hidden, num_groups * head_dim, scale=0.1),
            "value": normal(seed + 2, hidden, num_groups * head_dim, scale=0.1),
            "out": normal(seed + 3, num_heads * head_dim, hidden, scale=0.1),
            "gate": normal(seed + 4, hidden, 128, scale=0.1),
            "up": normal(seed + 5, hidden, 128, scale=0.1),
            "down": normal(seed + 6, 128, hidden, scale=0.1),
        }

    params = {
        "embed": normal(0, vocabulary, hidden, scale=0.1),
        "layers": [layer(10 * i) for i in range(1, num_layers + 1)],
        "norm": jnp.ones(hidden),
        "head": normal(9, hidden, vocabulary, scale=0.1),
    }

    def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def rotate(x: jax.Array) -> jax.Array:
        frequencies = 1e4 ** (-jnp.arange(0, head_dim, 2) / head_dim)
        angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[None, :, None]
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        rotated = [even * cos - odd * sin, even * sin + odd * cos]
        return jnp.stack(rotated, -1).reshape(x.shape)

    def attention(layer: Any, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape

        def heads(name: str, number: int) -> jax.Array:
            return (x @ layer[name]).reshape(batch, length, number, head_dim)

        query = rotate(heads("query", num_heads))
        key, value = rotate(heads("key", num_groups)), heads("value", num_groups)
        key, value = (jnp.repeat(y, num_heads // num_groups, 2) for y in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / head_dim**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return mixed.reshape(batch, length, -1) @ layer["out"]

    def feed_forward(layer: Any, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = x + attention(layer, rms_norm(x, layer["norm_1"]))
            x = x + feed_forward(layer, rms_norm(x, layer["norm_2"]))
        logits = rms_norm(x, params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    optimizer = optax.sgd(0.1, momentum=0.9)
    state = params, optimizer.init(params)
    return optax_step(loss, optimizer), (state, integers(3, 8, 16, high=vocabulary))


def unet() -> Program:
    """Strided and transposed convolutions, a skip, and noise drawn in the step."""
    params = {
        "in": normal(0, 3, 3, 4, 8, scale=0.1),
        "down": normal(1, 3, 3, 8, 16, scale=0.1),
        "middle": normal(2, 3, 3, 16, 16, scale=0.1),
        "up": normal(3, 2, 2, 16, 8, scale=0.1),
        "join": normal(4, 3, 3, 16, 8, scale=0.1),
        "out": normal(5, 1, 1, 8, 4, scale=0.1),
    }
    dims = ("NHWC", "HWIO", "NHWC")

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        strides = (stride, stride)
        return lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=dims
        )

    def predict_noise(params: Any, x: jax.Array) -> jax.Array:
        fine = jax.nn.relu(convolve(x, params["in"]))
        coarse = jax.nn.relu(convolve(fine, params["down"], stride=2))
        coarse = jax.nn.relu(convolve(coarse, params["middle"]))
        up = lax.conv_transpose(
            coarse, params["up"], (2, 2), "SAME", dimension_numbers=dims
        )
        joined = jnp.concatenate([up, fine], -1)
        return convolve(jax.nn.relu(convolve(joined, params["join"])), params["out"])

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        time = jax.random.uniform(key, (images.shape[0], 1, 1, 1))
        noise = jax.random.normal(jax.random.fold_in(key, 1), images.shape)
        noisy = images * time + noise * (1 - time)
        return jnp.mean((predict_noise(params, noisy) - noise) ** 2)

    def step(params: Any, images: jax.Array, key: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, images, key)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        return descend(params, grads, rate=1.0), {"loss": value, "grad_norm": norm}

    return step, (params, normal(9, 8, 16, 16, 4), jax.random.key(1))


def moe_scatter() -> Program:
    """Top-2 experts of limited capacity, filled by scatter and read by gather."""
    num_experts, num_tokens, hidden, capacity = 8, 64, 32, 16
    params = {
        "gate": normal(0, hidden, num_experts, scale=0.3),
        "up": normal(1, num_experts, hidden, 64, scale=0.1),
        "down": normal(2, num_experts, 64, hidden, scale=0.1),
    }

    def places(expert: jax.Array) -> jax.Array:
        """The rank of each choice among the choices of the same expert."""
        chosen = jax.nn.one_hot(expert.ravel(), num_experts, dtype=jnp.int32)
        return ((jnp.cumsum(chosen, 0) * chosen).max(-1) - 1).reshape(expert.shape)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(x @ params["gate"])
        weight, expert = lax.top_k(probabilities, 2)
        place = places(expert)
        fits = place < capacity
        slot = expert, jnp.where(fits, place, capacity)
        buffer = jnp.zeros((num_experts, capacity, hidden))
        buffer = buffer.at[slot].add(jnp.repeat(x[:, None], 2, 1), mode="drop")
        activated = jax.nn.gelu(jnp.einsum("ech,ehf->ecf", buffer, params["up"]))
        answers = jnp.einsum("ecf,efh->ech", activated, params["down"])
        chosen = answers[expert, jnp.clip(place, 0, capacity - 1)]
        output = (chosen * (weight * fits)[..., None]).sum(1)
        first_choices = jax.nn.one_hot(expert[:, 0], num_experts).mean(0)
        balance = jnp.sum(probabilities.mean(0) * first_choices)
        return jnp.mean((output - x) ** 2) + 0.01 * balance

    return descent_step(loss, rate=1.0), (params, normal(5, num_tokens, hidden))


def ssm() -> Program:
    """A linear recurrence over time as an associative scan."""
    params = {
        "decay": normal(0, 32),
        "in": normal(1, 16, 32, scale=0.3),
        "out": normal(2, 32, 16, scale=0.3),
    }

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        inputs = x @ params["in"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(params["decay"]), inputs.shape)
        _, states = lax.associative_scan(combine, (decay, inputs), axis=1)
        return jnp.mean((states @ params["out"] - x) ** 2)

    return descent_step(loss), (params, normal(4, 8, 8, 16))


def fft_mixer() -> Program:
    """Fourier transforms over features and over tokens, complex in between."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        mixed = jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2).real
        return jnp.mean(jnp.abs(mixed @ params["kernel"]))

    params = {"kernel": normal(0, 32, 32, scale=0.1)}
    return descent_step(loss), (params, normal(1, 8, 16, 32))


def decode() -> Program:
    """No training: greedy tokens with a cache, in a loop until all have ended."""
    batch, length, hidden, vocabulary = 8, 12, 32, 50
    params = {
        "embed": normal(2, vocabulary, hidden),
        "kernel": normal(0, hidden, hidden, scale=0.2),
        "head": normal(1, hidden, vocabulary, scale=0.2),
    }

    def next_token(params: Any, cache: Any, i: Any, token: Any) -> Any:
        hidden = jnp.tanh(params["embed"][token] @ params["kernel"])
        cache = lax.dynamic_update_slice(cache, hidden[:, None], (0, i, 0))
        scores = jnp.einsum("bh,bsh->bs", hidden, cache)
        weights = jax.nn.softmax(jnp.where(jnp.arange(length) <= i, scores, -1e9))
        logits = (jnp.einsum("bs,bsh->bh", weights, cache) + hidden) @ params["head"]
        return cache, jnp.argmax(logits, -1).astype(token.dtype)

    def step(cache: jax.Array, params: Any, token: jax.Array) -> Any:
        def is_running(carry: Any) -> jax.Array:
            i, token, _, _ = carry
            return (i < length) & ~jnp.all(token == 0)

        def body(carry: Any) -> Any:
            i, token, cache, tokens = carry
            cache, token = next_token(params, cache, i, token)
            return i + 1, token, cache, tokens.at[:, i].set(token)

        start = 0, token, cache, jnp.zeros((batch, length), token.dtype)
        _, _, cache, tokens = lax.while_loop(is_running, body, start)
        return cache, tokens

    cache = jnp.zeros((batch, length, hidden))
    return step, (cache, params, jnp.arange(1, batch + 1))


def odd_sizes() -> Program:
    """No dim that the devices divide."""
    params = {
        "in": normal(0, 7, 13, scale=0.3),
        "bias": jnp.zeros(13),
        "out": normal(1, 13, 3, scale=0.3),
    }

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return descent_step(loss), (params, normal(2, 10, 7), integers(1, 10, high=3))
