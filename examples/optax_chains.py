"""Optax: chains of every kind, and a moving average that starts as the parameters.

JAX_NUM_CPU_DEVICES=8 python examples/optax_chains.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import autopar

Params = dict[str, dict[str, jax.Array]]


class TrainState(NamedTuple):
    params: Params
    opt_state: Any
    average: Params


def is_kernel(params: Params) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def layer_labels(params: Params) -> Any:
    return {name: "head" if name == "head" else "body" for name in params}


schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "masked": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(1e-2), is_kernel),
        optax.scale_by_learning_rate(schedule),
    ),
    "multi_transform": optax.multi_transform(
        {"body": optax.adam(1e-2, eps=1e-3), "head": optax.sgd(1e-2, momentum=0.9)},
        layer_labels,
    ),
    "frozen": optax.multi_transform(
        {"body": optax.set_to_zero(), "head": optax.lion(1e-3)}, layer_labels
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "multi_steps": optax.MultiSteps(
        optax.adam(1e-2, eps=1e-3), every_k_schedule=2
    ).gradient_transformation(),
}


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    x = jax.nn.relu(x @ params["body"]["kernel"] + params["body"]["bias"])
    prediction = x @ params["head"]["kernel"] + params["head"]["bias"]
    return jnp.mean((prediction - y) ** 2)


@autopar.parallelize(static_argnums=0)
def train_step(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    x: jax.Array,
    y: jax.Array,
) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.average, step_size=0.1)
    return TrainState(params, opt_state, average), loss


def init_params(key: jax.Array) -> Params:
    key1, key2 = jax.random.split(key)
    return {
        "body": {
            "kernel": jax.random.normal(key1, (16, 64)) / 4,
            "bias": jnp.zeros(64),
        },
        "head": {"kernel": jax.random.normal(key2, (64, 1)) / 8, "bias": jnp.zeros(1)},
    }


def main() -> dict[str, tuple[TrainState, jax.Array]]:
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y, results = x.mean(axis=1, keepdims=True), {}
    for name, optimizer in OPTIMIZERS.items():
        params = init_params(jax.random.key(0))
        state = TrainState(params, optimizer.init(params), average=params)
        loss = jnp.inf
        for _ in range(4):
            state, loss = train_step(optimizer, state, x, y)
        print(f"{name}: step 4 on {jax.device_count()} devices: loss {loss:.4f}")
        results[name] = state, loss
    return results


if __name__ == "__main__":
    main()
