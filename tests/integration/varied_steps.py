"""Steps that train in varied ways, each as its users write it: `() -> (step, args)`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax

from tests.random_arrays import integers, normal

Step = Callable[..., Any]
Program = tuple[Step, tuple[Any, ...]]
Loss = Callable[..., jax.Array]


def descend(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def descent_step(loss: Loss, rate: float = 0.1) -> Step:
    """One step of gradient descent on `loss(params, *batch)`."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return descend(params, grads, rate), value

    return step


def optax_step(loss: Loss, optimizer: optax.GradientTransformation) -> Step:
    """One step of `optimizer` on `loss(params, *batch)`; state holds both."""

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def gan() -> Program:
    """Two networks, two optimizers; the second loss reads the first one's update."""
    generator = {
        "in": normal(0, 16, 32, scale=0.1),
        "out": normal(1, 32, 64, scale=0.1),
    }
    critic = {"in": normal(2, 64, 32, scale=0.1), "out": normal(3, 32, 1, scale=0.1)}
    adam, momentum = optax.adam(1e-3), optax.sgd(1e-2, momentum=0.9)

    def generate(params: Any, latent: jax.Array) -> jax.Array:
        return jnp.tanh(jax.nn.relu(latent @ params["in"]) @ params["out"])

    def judge(params: Any, images: jax.Array) -> jax.Array:
        return (jax.nn.leaky_relu(images @ params["in"]) @ params["out"])[:, 0]

    def critic_loss(critic: Any, generator: Any, images: Any, latent: Any) -> jax.Array:
        fakes = generate(generator, latent)
        on_real = jax.nn.softplus(-judge(critic, images)).mean()
        return on_real + jax.nn.softplus(judge(critic, fakes)).mean()

    def generator_loss(generator: Any, critic: Any, latent: Any) -> jax.Array:
        return jax.nn.softplus(-judge(critic, generate(generator, latent))).mean()

    train_critic = optax_step(critic_loss, momentum)
    train_generator = optax_step(generator_loss, adam)

    def step(state: Any, images: jax.Array, key: jax.Array) -> Any:
        latent = jax.random.normal(key, (images.shape[0], 16))
        critic, critic_value = train_critic(
            state["critic"], state["generator"][0], images, latent
        )
        generator, generator_value = train_generator(
            state["generator"], critic[0], latent
        )
        new_state = {"generator": generator, "critic": critic}
        return new_state, (critic_value, generator_value)

    state = {
        "generator": (generator, adam.init(generator)),
        "critic": (critic, momentum.init(critic)),
    }
    return step, (state, normal(7, 32, 64), jax.random.key(2))


def ppo() -> Program:
    """Three epochs over one batch of experience in a scan, with a clipped ratio."""
    params = {
        "hidden": normal(0, 8, 64, scale=0.1),
        "policy": normal(1, 64, 4, scale=0.1),
        "value": normal(2, 64, 1, scale=0.1),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["observation"] @ params["hidden"])
        log_probs = jax.nn.log_softmax(hidden @ params["policy"])
        taken = jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0]
        ratio = jnp.exp(taken - batch["log_prob"])
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
        error = (hidden @ params["value"])[:, 0] - batch["return"]
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return -gain + 0.5 * (error**2).mean() - 0.01 * entropy

    def step(params: Any, batch: Any) -> Any:
        def epoch(params: Any, _: None) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return descend(params, grads, rate=0.01), value

        return lax.scan(epoch, params, None, length=3)

    batch = {
        "observation": normal(3, 64, 8),
        "action": integers(1, 64, high=4),
        "advantage": normal(4, 64),
        "return": normal(5, 64),
        "log_prob": -jnp.abs(normal(6, 64)),
    }
    return step, (params, batch)


def clip_loss() -> Program:
    """Contrastive: every image against every caption, so examples meet in the loss."""
    params = {
        "image": normal(0, 48, 32, scale=0.1),
        "text": normal(1, 24, 32, scale=0.1),
        "log_scale": jnp.float32(1.0),
    }

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
        similarity = unit(images @ params["image"]) @ unit(texts @ params["text"]).T
        logits = similarity * jnp.exp(params["log_scale"])
        labels = jnp.arange(len(logits))
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        by_image = cross_entropy(logits, labels).mean()
        return (by_image + cross_entropy(logits.T, labels).mean()) / 2

    return descent_step(loss), (params, normal(2, 32, 48), normal(3, 32, 24))


def ensemble() -> Program:
    """Eight networks under `vmap` of the gradient, all on the same batch."""
    params = {
        "in": normal(0, 8, 16, 32, scale=0.1),
        "out": normal(1, 8, 32, 4, scale=0.1),
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        value_and_grads = jax.vmap(jax.value_and_grad(loss), in_axes=(0, None, None))
        values, grads = value_and_grads(params, x, y)
        return descend(params, grads), values

    return step, (params, normal(2, 64, 16), normal(3, 64, 4))


def maml() -> Program:
    """A gradient through a gradient step, under `vmap` over sixteen tasks."""
    params = {
        "in": normal(0, 1, 32),
        "bias": normal(1, 32),
        "out": normal(2, 32, 1, scale=0.1),
    }

    def task_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        predicted = jnp.sin(x @ params["in"] + params["bias"]) @ params["out"]
        return jnp.mean((predicted - y) ** 2)

    def loss(params: Any, support: Any, query: Any) -> jax.Array:
        def after_adapting(support: Any, query: Any) -> jax.Array:
            adapted = descend(params, jax.grad(task_loss)(params, *support))
            return task_loss(adapted, *query)

        return jax.vmap(after_adapting)(support, query).mean()

    support = normal(3, 16, 5, 1), normal(4, 16, 5, 1)
    query = normal(5, 16, 5, 1), normal(6, 16, 5, 1)
    return descent_step(loss), (params, support, query)


def bf16_mixed() -> Program:
    """Products in bfloat16, a scaled loss, and an update skipped if not finite."""
    params = {
        "up": normal(0, 64, 128, scale=0.1),
        "down": normal(1, 128, 64, scale=0.1),
    }
    optimizer = optax.adamw(1e-3, eps=1e-4)
    loss_scale = 1024.0

    def scaled_loss(params: Any, x: jax.Array) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        hidden = jax.nn.gelu(x.astype(jnp.bfloat16) @ half["up"])
        output = (hidden @ half["down"]).astype(jnp.float32)
        return jnp.mean((output - x) ** 2) * loss_scale

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(scaled_loss)(params, x)
        grads = jax.tree.map(lambda g: g / loss_scale, grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_state = optax.apply_updates(params, updates), new_opt_state
        state = lax.cond(finite.all(), lambda: new_state, lambda: state)
        return state, value / loss_scale

    return step, ((params, optimizer.init(params)), normal(2, 32, 64))


def lora_frozen() -> Program:
    """The step closes over the large kernel, a constant; two small ones train."""
    frozen = normal(0, 64, 64, scale=0.1)
    params = {"down": normal(1, 64, 4, scale=0.1), "up": normal(3, 4, 64, scale=0.1)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ frozen + x @ params["down"] @ params["up"] - x) ** 2)

    return descent_step(loss), (params, normal(2, 32, 64))


def muon() -> Program:
    """An optimizer that multiplies matrices: Newton-Schulz on every gradient."""
    params = {"up": normal(0, 32, 64, scale=0.1), "down": normal(1, 64, 32, scale=0.1)}
    optimizer = optax.contrib.muon(1e-2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)

    state = params, optimizer.init(params)
    return optax_step(loss, optimizer), (state, normal(2, 64, 32))
