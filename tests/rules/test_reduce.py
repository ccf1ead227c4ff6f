"""Reductions, cumulative operators and sorts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.sharding.spec import MAX, MIN, REPLICATED, SUM
from tests.rules.strategy_oracle import (
    MESH_2X4,
    check_every_strategy,
    factor_sizes,
    factor_table,
    operator_of,
    random_array,
)

X = random_array(4, 6, 2)


def test_factors_of_a_sum() -> None:
    op = operator_of("reduce_sum", lambda x: x.sum((0, 2)), X)
    assert factor_table(op) == {
        "d1": ((1,), (0,)),
        "k0": ((0,), (SUM,)),
        "k2": ((2,), (SUM,)),
        "sum0": ((SUM,), (SUM,)),
    }
    assert factor_sizes(op) == {"d1": 6, "k0": 4, "k2": 2, "sum0": 0}


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_sums(axes: tuple[int, ...]) -> None:
    reached = check_every_strategy(lambda x: x.sum(axes), X)
    assert {"sum0", *(f"k{dim}" for dim in axes)} <= reached["reduce_sum"]


@pytest.mark.parametrize(
    ("kind", "function", "state"),
    [("reduce_max", jnp.max, MAX), ("reduce_min", jnp.min, MIN)],
)
def test_extrema_are_pending(kind: str, function: Callable, state: int) -> None:
    op = operator_of(kind, lambda x: function(x, 0), X)
    table = factor_table(op)
    assert table["k0"] == ((0,), (state,))
    assert set(table) == {"k0", "d1", "d2"}
    with_nan = np.where(X > 1.5, np.nan, X)
    for x in (X, with_nan, (10 * X).astype(np.int32), np.full((4, 1, 2), -np.inf)):
        check_every_strategy(lambda x: function(x, (0, 1)), x)


@pytest.mark.parametrize(
    ("kind", "function", "state"),
    [("reduce_or", jnp.any, MAX), ("reduce_and", jnp.all, MIN)],
)
def test_booleans_are_pending(kind: str, function: Callable, state: int) -> None:
    op = operator_of(kind, lambda x: function(x, 1), X > 0)
    assert factor_table(op)["k1"] == ((1,), (state,))
    check_every_strategy(lambda x: [function(x, 1), function(x, (0, 2))], X > 0)


def test_bitwise_reductions_are_not_pending() -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        identity = np.int32(-1), np.int32(0)
        return [
            lax.reduce(x, identity[0], lax.bitwise_and, (0,)),
            lax.reduce(x, identity[1], lax.bitwise_or, (0,)),
            lax.reduce(x, identity[1], lax.bitwise_xor, (0,)),
        ]

    reached = check_every_strategy(function, (10 * X).astype(np.int32))
    assert reached == dict.fromkeys(
        ("reduce_and", "reduce_or", "reduce_xor"), {"-", "d1", "d2"}
    )


def test_integer_sums_are_split_but_not_passed_on() -> None:
    x = (10 * X).astype(np.int32)
    op = operator_of("reduce_sum", lambda x: x.sum(0), x)
    assert set(factor_table(op)) == {"k0", "d1", "d2"}
    check_every_strategy(lambda x: x.sum((0, 1)), x)


def test_products_and_positions_need_whole_dims() -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        return [x.prod(0), jnp.argmax(x, 0), jnp.argmin(x, 0)]

    reached = check_every_strategy(function, X)
    for kind in ("reduce_prod", "argmax", "argmin"):
        assert reached[kind] == {"-", "d1", "d2"}


def test_a_reduction_of_ones_own() -> None:
    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        def combine(a: tuple, b: tuple) -> tuple:
            return a[0] * b[0] + a[0], a[1] + b[0]

        return lax.reduce((x, y), (np.float32(1), np.float32(0)), combine, (1,))

    op = operator_of("reduce", function, X, X + 1)
    assert factor_table(op)["d2"] == ((2, 2, REPLICATED, REPLICATED), (1, 1))
    check_every_strategy(function, X, X + 1)


def test_sorts_and_top_k() -> None:
    def function(x: jax.Array) -> list[object]:
        return [jnp.sort(x, 1), jnp.argsort(x, 1), lax.top_k(x, 1), lax.sort(x)]

    reached = check_every_strategy(function, X, kinds=("sort", "top_k"))
    assert reached == {"sort": {"-", "d0", "d1", "d2"}, "top_k": {"-", "d0", "d1"}}
    check_every_strategy(lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), X)


def test_odd_sizes_and_unequal_axes() -> None:
    reached = check_every_strategy(
        lambda x: x.sum(0), random_array(3, 8), mesh=MESH_2X4
    )
    assert reached["reduce_sum"] == {"-", "d1", "sum0"}
    check_every_strategy(lambda x: x.sum(), random_array(1, 8, 5), mesh=MESH_2X4)
    x = random_array(8, 4).astype(jnp.bfloat16)
    check_every_strategy(lambda x: lax.reduce_max(x, (0,)), x, mesh=MESH_2X4)


@pytest.mark.parametrize(
    ("kind", "reduction"), [("psum", lax.psum), ("pmax", lax.pmax), ("pmin", lax.pmin)]
)
def test_collectives_over_the_axis_of_a_vmap(kind: str, reduction: Callable) -> None:
    def centred(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: x - reduction(x, "rows"), axis_name="rows")(x)

    op = operator_of(kind, centred, X)
    state = {"psum": SUM, "pmax": MAX, "pmin": MIN}[kind]
    assert factor_table(op)["k0"] == ((0,), (state,))
    assert {"k0", "d1", "d2"} <= check_every_strategy(centred, X)[kind]
