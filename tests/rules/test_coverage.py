"""What models, losses and optimizers are made of has rules, and the rules are right."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import nn

from autopar.rules.base import rule_of
from tests.marks import slow
from tests.rules.strategy_oracle import (
    check_every_strategy,
    operators_of,
    random_array,
)

X = random_array(8, 16)
LABELS = np.arange(8, dtype=np.int32)


def layer_norm(x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(x: jax.Array) -> jax.Array:
    heads = x.reshape(1, 8, 4, 4)
    return nn.dot_product_attention(heads, heads, heads, is_causal=True)


def cross_entropy(x: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x, LABELS)


FUNCTIONS = {
    "softmax": nn.softmax,
    "log_softmax": nn.log_softmax,
    "logsumexp": lambda x: nn.logsumexp(x, -1),
    "gelu": nn.gelu,
    "exact gelu": lambda x: nn.gelu(x, approximate=False),
    "silu": nn.silu,
    "softplus": nn.softplus,
    "glu": nn.glu,
    "layer norm": layer_norm,
    "attention": attention,
    "cross entropy": cross_entropy,
    "one hot": lambda x: nn.one_hot(LABELS, 16) * x,
    "std": lambda x: jnp.std(x, 0),
    "split": lambda x: jnp.split(x, 2, axis=1),
    "where": lambda x: jnp.where(x > 0, x, 0),
    "tril": jnp.tril,
    "einsum": lambda x: jnp.einsum("ab,cb->ac", x, x),
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "norm": jnp.linalg.norm,
    "roll": lambda x: jnp.roll(x, 1, 1),
    "repeat": lambda x: jnp.repeat(x, 2, 0),
    "sort": lambda x: jnp.sort(x, -1),
    "median": jnp.median,
    "reflecting pad": lambda x: jnp.pad(x, 1, mode="reflect"),
    "remainder": lambda x: jnp.mod(x, 3),
    "take": lambda x: jnp.take_along_axis(x, LABELS[:, None], 1),
    "resize": lambda x: jax.image.resize(x, (16, 32), "bilinear"),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
}
OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "clipped sgd": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-3),
}


def leaves(tree: Any) -> Iterator[jax.Array]:
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            yield leaf


def with_gradient(function: Callable[..., Any]) -> Callable[[jax.Array], Any]:
    """The gradient of a sum of squares, which runs the function forward as well."""
    return jax.grad(lambda x: sum(jnp.sum(y**2) for y in leaves(function(x))))


def updated(optimizer: optax.GradientTransformation) -> Callable[[jax.Array], Any]:
    def function(x: jax.Array) -> Any:
        params = {"weight": x, "bias": x[0]}
        updates, state = optimizer.update(params, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    return function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_rules(name: str) -> None:
    for function in (FUNCTIONS[name], with_gradient(FUNCTIONS[name])):
        missing = [op.kind for op in operators_of(function, X) if not rule_of(op)]
        assert not missing


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_rules(name: str) -> None:
    operators = operators_of(updated(OPTIMIZERS[name]), X)
    assert not [op.kind for op in operators if not rule_of(op)]


@pytest.mark.parametrize(
    "function",
    [
        layer_norm,
        slow(attention),
        slow(cross_entropy),
    ],
)
def test_functions_are_right_under_sampled_strategies(function: Callable) -> None:
    check_every_strategy(with_gradient(function), X, max_strategies=3)


def test_optimizers_are_right_under_sampled_strategies() -> None:
    check_every_strategy(updated(OPTIMIZERS["adafactor"]), X, max_strategies=3)
