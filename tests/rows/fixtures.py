"""The small models that acceptance rows give numbers for, as plain JAX functions.

Dims of a model have distinct sizes, so that a size is a name for its dim: a layout such
as `{64: "rows", 512: "cols"}` says all that a Mesh-TensorFlow layout says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class Case:
    """A function and arguments for it."""

    step: Callable[..., Any]
    args: tuple[Any, ...]


def random(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """The same normal numbers for the same seed and shape."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(numbers, jnp.float32)


def sgd(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def tanh_chain(
    params: list[jax.Array], x: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """Products, each under a tanh, and a mean of squares; one SGD step and its loss."""

    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for kernel in params:
            y = jnp.tanh(y @ kernel)
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


def f1(batch: int = 64) -> Case:
    """F1: relu(x w) v, d_io 128, d_h 512; one SGD step, which returns no loss."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> Params:
        def loss(params: Params) -> jax.Array:
            hidden = jnp.maximum(x @ params["w"], 0.0)
            return jnp.mean((hidden @ params["v"] - y) ** 2)

        return sgd(params, jax.grad(loss)(params))

    params = {"w": random(0, 128, 512, scale=0.1), "v": random(1, 512, 128, scale=0.1)}
    return Case(step, (params, random(2, batch, 128), random(3, batch, 128)))


def dense_stack(batch: int, hidden: int, num_layers: int = 6) -> Case:
    """Alpa's test model: Dense and relu, mean squared error, Adam.

    Its epsilon is large, for Adam's first steps are the signs of gradients, which turn
    rounding into whole steps where a gradient is nearly zero.
    """
    optimizer = optax.adam(1e-2, eps=1e-2)

    def step(state: Any, batch: Params) -> tuple[Any, jax.Array]:
        layers, moments = state

        def loss(layers: list[Params]) -> jax.Array:
            y = batch["x"]
            for layer in layers:
                y = jax.nn.relu(y @ layer["kernel"] + layer["bias"])
            return jnp.mean((y - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(layers)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(layers, updates), moments), value

    layers = [
        {
            "kernel": random(i, hidden, hidden, scale=hidden**-0.5),
            "bias": jnp.zeros(hidden),
        }
        for i in range(num_layers)
    ]
    data = {"x": random(10, batch, hidden), "y": random(11, batch, hidden)}
    return Case(step, ((layers, optimizer.init(layers)), data))


def f6() -> Case:
    """F6: eight tanh layers 64 x 64 and a mean squared error, 32 rows; plain SGD.

    Four stages of two layers and eight microbatches of four rows, 1,024 bytes each.
    """

    def step(layers: list[jax.Array], x: jax.Array, y: jax.Array) -> Any:
        def loss(layers: list[jax.Array]) -> jax.Array:
            hidden = x
            for layer in layers:
                hidden = jnp.tanh(hidden @ layer)
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(layers)
        return sgd(layers, grads, rate=1.0), value

    layers = [random(i, 64, 64, scale=0.125) for i in range(8)]
    return Case(step, (layers, random(8, 32, 64), random(9, 32, 64)))


BATCH, SEQ, HIDDEN, HEADS, HEAD_DIM, MLP = 2, 64, 128, 8, 16, 512
BSH_BYTES = BATCH * SEQ * HIDDEN * 4


def layer_params(seed: int, *, fused: bool = True) -> Params:
    """Parameters of F3: h 128, 8 heads, MLP of 4h, fused or separate q, k and v."""
    shapes: dict[str, tuple[int, ...]] = {
        "out": (HEADS, HEAD_DIM, HIDDEN),
        "up": (HIDDEN, MLP),
        "down": (MLP, HIDDEN),
    }
    if fused:
        shapes["qkv"] = (HIDDEN, 3, HEADS, HEAD_DIM)
    else:
        shapes |= {name: (HIDDEN, HEADS, HEAD_DIM) for name in "qkv"}
    params = {
        name: random(seed + i, *shape, scale=0.05)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return params | {"norm1": jnp.ones(HIDDEN), "norm2": jnp.ones(HIDDEN)}


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def attention(params: Params, x: jax.Array) -> jax.Array:
    if "qkv" in params:
        q, k, v = jnp.einsum("bsh,hqnd->qbsnd", x, params["qkv"])
    else:
        q, k, v = (jnp.einsum("bsh,hnd->bsnd", x, params[name]) for name in "qkv")
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * HEAD_DIM**-0.5
    mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
    return jnp.einsum("bqnd,ndh->bqh", mixed, params["out"])


def f3_forward() -> Case:
    """F3, forward only: b 2, s 64."""
    return Case(_layer, (layer_params(0), random(9, BATCH, SEQ, HIDDEN)))


def f3(*, fused: bool = True) -> Case:
    """F3, forward and backward, with the gradient for its input that a stack needs."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params, x: jax.Array) -> jax.Array:
            return jnp.mean((_layer(params, x) - y) ** 2)

        grads, x_grad = jax.grad(loss, (0, 1))(params, x)
        return sgd(params, grads), x_grad

    x, y = random(9, BATCH, SEQ, HIDDEN), random(10, BATCH, SEQ, HIDDEN)
    return Case(step, (layer_params(0, fused=fused), x, y))


def _layer(params: Params, x: jax.Array) -> jax.Array:
    x = x + attention(params, norm(params["norm1"], x))
    up = jax.nn.gelu(norm(params["norm2"], x) @ params["up"])
    return x + up @ params["down"]


def encoder(num_layers: int) -> Case:
    """BERT's layers, normed after each sum, on embedded tokens; SGD."""

    def step(layers: list[Params], x: jax.Array, y: jax.Array) -> list[Params]:
        def loss(layers: list[Params]) -> jax.Array:
            z = x
            for layer in layers:
                z = norm(layer["norm1"], z + attention(layer, z))
                up = jax.nn.gelu(z @ layer["up"])
                z = norm(layer["norm2"], z + up @ layer["down"])
            return jnp.mean((z - y) ** 2)

        return sgd(layers, jax.grad(loss)(layers))

    layers = [layer_params(20 * i) for i in range(num_layers)]
    return Case(
        step, (layers, random(9, BATCH, SEQ, HIDDEN), random(10, BATCH, SEQ, HIDDEN))
    )


VOCAB, NUM_TOKENS, WIDTH = 512, 32, 64


def token_losses(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of each token of a language model that is embedding and head."""
    logits = jnp.tanh(params["table"][tokens]) @ params["head"]
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def language_model() -> Case:
    """`token_losses` of 2 x 16 tokens, 64 wide, 512 words; its SGD step."""

    def step(
        params: Params, tokens: jax.Array, targets: jax.Array
    ) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            return token_losses(params, tokens, targets).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    params = {
        "table": random(0, VOCAB, WIDTH),
        "head": random(1, WIDTH, VOCAB, scale=0.1),
    }
    numbers = np.random.default_rng(2).integers(0, VOCAB, (2, 2, NUM_TOKENS // 2))
    tokens, targets = jnp.asarray(numbers, jnp.int32)
    return Case(step, (params, tokens, targets))


LM_VOCAB, LM_SEQ = 1024, 32


def transformer_lm(num_layers: int = 2) -> Case:
    """A language model of F3's layers, 2 x 32 tokens, 1024 words; Adam."""
    optimizer = optax.adam(1e-2, eps=1e-2)

    def step(
        state: Any, tokens: jax.Array, targets: jax.Array
    ) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            x = params["table"][tokens]
            for layer in params["layers"]:
                x = _layer(layer, x)
            logits = x @ params["head"]
            picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = {
        "table": random(0, LM_VOCAB, HIDDEN),
        "layers": [layer_params(20 * (i + 1)) for i in range(num_layers)],
        "head": random(1, HIDDEN, LM_VOCAB, scale=0.1),
    }
    numbers = np.random.default_rng(2).integers(0, LM_VOCAB, (2, BATCH, LM_SEQ))
    tokens, targets = jnp.asarray(numbers, jnp.int32)
    return Case(step, ((params, optimizer.init(params)), tokens, targets))


NUM_EXPERTS, CAPACITY = 8, 4


def _dispatch(gates: jax.Array) -> jax.Array:
    """Weights `[G, S, E, C]` of each token's place in its two experts, if any."""
    weights, experts = jax.lax.top_k(gates, 2)
    chosen = jax.nn.one_hot(experts, NUM_EXPERTS)  # [G, S, 2, E]
    first, second = chosen[:, :, 0], chosen[:, :, 1]
    before = jnp.cumsum(first, axis=1) - first
    after = first.sum(1, keepdims=True) + jnp.cumsum(second, axis=1) - second
    places = jnp.stack([before, after], axis=2)
    slots = jax.nn.one_hot(places.astype(jnp.int32), CAPACITY) * chosen[..., None]
    return jnp.einsum("gsk,gskec->gsec", weights, slots)


def experts(params: Params, x: jax.Array, annotate: Any = lambda x, _: x) -> jax.Array:
    """F4: x is `[G, S, M]`; `annotate(tensor, "gecm")` is called on inner tensors."""
    combine = annotate(_dispatch(jax.nn.softmax(x @ params["gate"])), "gsec")
    inputs = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
    inputs = annotate(inputs, "egcm")
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inputs, params["up"]))
    outputs = jnp.einsum("egch,ehm->egcm", annotate(hidden, "egch"), params["down"])
    outputs = annotate(outputs, "egcm")
    return annotate(x + jnp.einsum("gsec,egcm->gsm", combine, outputs), "gsm")


def experts_forward(annotate: Any = lambda x, _: x) -> Case:
    """F4: top-2 gates, G 8 groups of S 16 tokens, M 32, E 8, C 4, H 64."""

    def forward(params: Params, x: jax.Array) -> jax.Array:
        return experts(params, x, annotate)

    params, batch = mixture_of_experts().args
    return Case(forward, (params, batch["x"]))


def mixture_of_experts() -> Case:
    """F4, trained."""

    def step(params: Params, batch: Params) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            return jnp.mean((experts(params, batch["x"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    params = {
        "gate": random(0, 32, NUM_EXPERTS, scale=0.5),
        "up": random(1, NUM_EXPERTS, 32, 64, scale=0.2),
        "down": random(2, NUM_EXPERTS, 64, 32, scale=0.2),
    }
    return Case(step, (params, {"x": random(3, 8, 16, 32), "y": random(4, 8, 16, 32)}))


def many_transformations() -> Case:
    """One step with grad, vmap, scan, remat, custom_vjp and an inner jit."""

    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (jnp.clip(grad, -0.01, 0.01),)

    clipped.defvjp(forward, backward)

    @jax.checkpoint
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return clipped(jnp.tanh(x @ kernel)), None

    @jax.jit
    def example_loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.sum((x @ params["head"] - y) ** 2)

    def step(params: Params, batch: Params) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            losses = jax.vmap(example_loss, (None, 0, 0))
            return losses(params, batch["x"], batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads, 0.01), value

    params = {"layers": random(0, 3, 32, 32, scale=0.2), "head": random(1, 32, 8)}
    return Case(step, (params, {"x": random(2, 16, 32), "y": random(3, 16, 8)}))
