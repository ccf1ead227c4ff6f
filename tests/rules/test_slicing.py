"""Cutting apart and joining: dims that stay whole, and pending sums."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    MESH_2X4,
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)

X, Y = random_array(4, 6, 8), random_array(4, 6, 8, seed=1)


@pytest.mark.parametrize(
    ("starts", "limits", "strides", "names"),
    [
        ((0, 1, 0), (4, 3, 8), None, {"d0", "d2"}),
        ((0, 0, 0), (4, 6, 8), None, {"d0", "d1", "d2"}),
        ((1, 0, 0), (2, 6, 8), (1, 1, 2), {"d1"}),
        ((0, 0, 4), (4, 6, 8), (1, 3, 1), {"d0"}),
        ((2, 3, 5), (2, 4, 7), None, set()),
    ],
)
def test_slice(starts: tuple, limits: tuple, strides: tuple, names: set[str]) -> None:
    def function(x: jax.Array) -> jax.Array:
        return lax.slice(x, starts, limits, strides)

    assert set(factor_table(operator_of("slice", function, X))) == names | {"sum0"}
    check_every_strategy(function, X)


def test_split_has_several_results() -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        return jnp.split(x, [1, 3], axis=1)

    op = operator_of("split", function, X)
    assert factor_table(op) == {
        "d0": ((0,), (0, 0, 0)),
        "d2": ((2,), (2, 2, 2)),
        "sum0": ((SUM,), (SUM, SUM, SUM)),
    }
    check_every_strategy(function, X)


def test_stack_and_unstack_shift_dims() -> None:
    stack = operator_of("stack", lambda x, y: jnp.stack([x, y], 1), X, Y)
    assert factor_table(stack) == {
        "d0": ((0, 0), (0,)),
        "d1": ((1, 1), (2,)),
        "d2": ((2, 2), (3,)),
        "sum0,1": ((SUM, SUM), (SUM,)),
    }
    unstack = operator_of("unstack", lambda x: jnp.unstack(x[:, :2], axis=1), X)
    assert factor_table(unstack) == {
        "d0": ((0,), (0, 0)),
        "d2": ((2,), (1, 1)),
        "sum0": ((SUM,), (SUM, SUM)),
    }
    x, y = X[:, :2], Y[:, :2]
    for axis in (0, 1, 3):
        check_every_strategy(lambda x, y, axis=axis: jnp.stack([x, y], axis), x, y)
    for axis in (0, 1):
        check_every_strategy(lambda x, axis=axis: jnp.unstack(x, axis=axis), x)


def test_concatenate_is_linear_jointly() -> None:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.concatenate([x, y[:, :1], x], 1)

    op = operator_of("concatenate", function, X, Y)
    assert factor_table(op) == {
        "d0": ((0, 0, 0), (0,)),
        "d2": ((2, 2, 2), (2,)),
        "sum0,1,2": ((SUM, SUM, SUM), (SUM,)),
    }
    check_every_strategy(function, X, Y)


def test_pad() -> None:
    config = ((0, 0, 0), (1, 0, 2), (0, 0, 0))
    zero = operator_of("pad", lambda x: lax.pad(x, np.float32(0), config), X)
    assert factor_table(zero) == {
        "d0": ((0, REPLICATED), (0,)),
        "d2": ((2, REPLICATED), (2,)),
        "sum0": ((SUM, REPLICATED), (SUM,)),
    }
    one = operator_of("pad", lambda x: lax.pad(x, np.float32(1), config), X)
    assert set(factor_table(one)) == {"d0", "d2"}
    value = operator_of("pad", lambda x, y: lax.pad(x, y, config), X, Y[0, 0, 0])
    assert set(factor_table(value)) == {"d0", "d2", "sum0,1"}
    check_every_strategy(lambda x: lax.pad(x, np.float32(0), config), X)
    check_every_strategy(lambda x, y: lax.pad(x, y, config), X, Y[0, 0, 0])
    check_every_strategy(lambda x: jnp.pad(x, ((0, 0), (0, 0), (2, 0))), X)


@pytest.mark.parametrize("start", [0, 2, 9, -1])
def test_dynamic_slice(start: int) -> None:
    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (0, i, i), (4, 2, 8))

    op = operator_of("dynamic_slice", function, X, np.int32(start))
    whole = (REPLICATED,) * 3
    assert factor_table(op) == {
        "d0": ((0, *whole), (0,)),
        "d2": ((2, *whole), (2,)),
        "sum0": ((SUM, *whole), (SUM,)),
    }
    check_every_strategy(function, X, np.int32(start), kinds=("dynamic_slice",))


@pytest.mark.parametrize("start", [0, 2, 9])
def test_dynamic_update_slice(start: int) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, y[:, :2], (i, i, 0))

    op = operator_of("dynamic_update_slice", function, X, Y, np.int32(start))
    assert set(factor_table(op)) == {"d0", "d2", "sum0,1"}
    check_every_strategy(
        function, X, Y, np.int32(start), kinds=("dynamic_update_slice",)
    )


def halves(x: jax.Array) -> jax.Array:
    """Rotary embeddings cut the last dim, turn it and join it again."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-right, left], axis=-1)


@pytest.mark.parametrize(
    "function",
    [halves, jax.grad(lambda x: (halves(x) ** 2).sum()), lambda x: jnp.roll(x, 1, 1)],
)
def test_programs_and_their_gradients(function: Callable) -> None:
    check_every_strategy(function, X, mesh=MESH_2X4, max_strategies=6)


def test_odd_and_unit_sizes() -> None:
    x = random_array(3, 1, 5)
    check_every_strategy(lambda x: x[:, :, 1:], x)
    check_every_strategy(lambda x: jnp.concatenate([x, x], 1), x)
