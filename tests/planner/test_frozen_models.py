"""Weights that a step only reads are not taken for its batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.tracing import trace
from autopar.planner.planning import roles_of

from ..rows.running import run_as_planned

WIDTH, BEAMS = 16, 8


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 4


def block(hidden: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    inner = jnp.tanh(hidden * weights["scale"] @ weights["up"])
    return hidden + inner @ weights["down"] + weights["bias"]


def weights_of(*layers: int) -> dict[str, jax.Array]:
    return {
        "scale": jnp.ones((*layers, WIDTH)),
        "up": normal(1, *layers, WIDTH, 2 * WIDTH),
        "down": normal(2, *layers, 2 * WIDTH, WIDTH),
        "bias": jnp.ones((*layers, WIDTH)),
    }


def search(model: Any, beams: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One token for each beam; layers in a list, or stacked."""
    hidden = model["embed"][beams["token"]] + beams["hidden"]
    if isinstance(model["layers"], list):
        for weights in model["layers"]:
            hidden = block(hidden, weights)
    else:
        hidden = jax.lax.scan(
            lambda hidden, weights: (block(hidden, weights), None),
            hidden,
            model["layers"],
        )[0]
    token = jnp.argmax(hidden @ model["embed"].T, -1).astype(jnp.int32)
    return {"token": token, "hidden": hidden}


EMBEDDING = normal(0, 40, WIDTH)
MODELS: dict[str, Any] = {
    "list": {"embed": EMBEDDING, "layers": [weights_of(), weights_of()]},
    "stack": {"embed": EMBEDDING, "layers": weights_of(6)},
}
BEAM_STATE = {
    "token": jnp.arange(BEAMS, dtype=jnp.int32),
    "hidden": normal(3, BEAMS, WIDTH),
}


def batch_of(step: Callable[..., Any], *args: Any) -> list[str]:
    traced = trace(step, args, {})
    roles = zip(traced.input_paths, roles_of(traced).roles, strict=True)
    return [path for path, role in roles if role == "batch"]


def test_a_step_of_frozen_weights_and_state_has_no_batch() -> None:
    for model in MODELS.values():
        assert batch_of(search, model, BEAM_STATE) == []
    model = MODELS["list"]
    parallel = autopar.parallelize(search, method=autopar.DataParallel(), mesh="x:8")
    with pytest.raises(ValueError, match="no argument that is batch.*batch_argnums"):
        parallel.plan(model, BEAM_STATE)
    parallel = autopar.parallelize(search, mesh="x:8", num_microbatches=2)
    with pytest.raises(ValueError, match="none was found.*batch_argnums"):
        parallel.plan(model, BEAM_STATE)


def test_state_that_is_named_is_the_batch_beside_frozen_weights() -> None:
    method = autopar.DataParallel()
    step = autopar.parallelize(search, method=method, mesh="x:8", batch_argnums=1)
    plan = run_as_planned(step, MODELS["list"], BEAM_STATE).plan.sharding
    split = {i.path for i in plan.inputs if i.spec[0] == 0}
    assert split == {"beams['hidden']", "beams['token']"}


def test_a_prompt_is_the_batch_beside_weights_of_one_leading_size() -> None:
    """Weights have one leading size too, and it is larger."""

    def sample(
        weights: list[jax.Array], total: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        hidden = prompt
        for each in weights:
            hidden = jnp.tanh(hidden @ each)
        return hidden, total + hidden.sum()

    weights = [normal(seed, WIDTH, WIDTH) for seed in range(2)]
    args = weights, jnp.ones(3), normal(3, 8, WIDTH)
    assert batch_of(sample, *args) == ["prompt"]
    mesh = {"mesh": "x:8", "num_microbatches": 2}
    run_as_planned(autopar.parallelize(sample, **mesh), *args)


def contrastive(left: jax.Array, right: jax.Array) -> jax.Array:
    return -jnp.diag(jax.nn.log_softmax(left @ right.T)).mean()


def decorrelated(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.square(left.T @ right - jnp.eye(WIDTH)).sum()


def normalised(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.square((left - left.mean(0)) / (left.std(0) + 1) - right).mean()


def linear(left: jax.Array, right: jax.Array) -> jax.Array:
    return (left + right).sum()


@pytest.mark.parametrize("loss", [contrastive, decorrelated, normalised, linear])
def test_views_of_examples_stay_the_batch(loss: Callable[..., jax.Array]) -> None:
    """Losses over all examples, and one whose cotangents are the same for each."""

    def step(weight: jax.Array, views: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        def total(weight: jax.Array) -> jax.Array:
            return loss(*(views[name] @ weight @ weight for name in ("left", "right")))

        value, gradient = jax.value_and_grad(total)(weight)
        return weight - 0.1 * gradient, value

    views = {"left": normal(0, 8, WIDTH), "right": normal(1, 8, WIDTH)}
    args = normal(2, WIDTH, WIDTH), views
    assert batch_of(step, *args) == ["views['left']", "views['right']"]
