"""Operators that rename dims, and those that make values from a shape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.rules.reshape import group_leaders
from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_sizes,
    factor_table,
    operator_of,
    random_array,
)

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("source", "target", "sizes"),
    [
        ((64, 128), (8, 8, 128), {"d0": 8, "d1": 128}),
        ((8, 8, 128), (64, 128), {"d0": 8, "d2": 128}),
        ((4, 16, 12), (4, 16, 4, 3), {"d0": 4, "d1": 16, "d2": 4}),
        ((4, 16, 4, 3), (4, 16, 12), {"d0": 4, "d1": 16, "d2": 4}),
        ((4, 6), (1, 4, 1, 6, 1), {"d0": 4, "d1": 6}),
        ((1, 4, 1, 6), (4, 6), {"d1": 4, "d3": 6}),
        ((6, 4), (3, 8), {"d0": 3}),
        ((6, 4), (4, 6), {"d0": 2}),
        ((3, 5), (5, 3), {}),
        ((24,), (2, 3, 4), {"d0": 2}),
        ((2, 2, 6), (4, 3, 2), {"d0": 2, "d2": 3}),
        ((1, 1), (), {}),
        ((0, 4), (4, 0), {}),
    ],
)
def test_reshape(source: Shape, target: Shape, sizes: dict[str, int]) -> None:
    x = random_array(*source)
    op = operator_of("reshape", lambda x: lax.reshape(x, target), x)
    assert factor_sizes(op) == {**sizes, "sum0": 0}
    for mesh in (MESH_8, MESH_2X4):
        check_every_strategy(lambda x: lax.reshape(x, target), x, mesh=mesh)


def test_reshape_pairs_major_dims() -> None:
    x = random_array(4, 1, 6, 5)
    op = operator_of("reshape", lambda x: lax.reshape(x, (24, 1, 5)), x)
    table = factor_table(op)
    assert table == {"d0": ((0,), (0,)), "d3": ((3,), (2,)), "sum0": ((SUM,), (SUM,))}


@settings(max_examples=30)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6), st.data())
def test_groups_hold_equally_many_elements(
    sizes: list[int], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sizes)))) | {0, len(sizes)})
    merged = [int(np.prod(sizes[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
    leaders = list(group_leaders(sizes, merged))
    assert [j for _, j in leaders] == [j for j, size in enumerate(merged) if size > 1]
    for i, j in leaders:
        assert np.prod(sizes[:i]) == np.prod(merged[:j])


@pytest.mark.parametrize(
    ("function", "table"),
    [
        (
            lambda x: lax.squeeze(x, (1,)),
            {"d0": ((0,), (0,)), "d2": ((2,), (1,)), "d3": ((3,), (2,))},
        ),
        (
            lambda x: lax.transpose(x, (3, 1, 0, 2)),
            {"d3": ((3,), (0,)), "d0": ((0,), (2,)), "d2": ((2,), (3,))},
        ),
        (
            lambda x: lax.rev(x, (1, 2)),
            {"d0": ((0,), (0,)), "d3": ((3,), (3,))},
        ),
    ],
)
def test_moved_dims(function: Callable, table: dict[str, tuple]) -> None:
    x = random_array(4, 1, 6, 8)
    (kind,) = check_every_strategy(function, x)
    assert factor_table(operator_of(kind, function, x)) == {
        **table,
        "sum0": ((SUM,), (SUM,)),
    }
    check_every_strategy(function, x.astype(np.int32), max_strategies=8)


def test_broadcast_shares_old_dims_and_cuts_new_ones() -> None:
    def function(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (2, 4, 8, 6), (1, 2))

    x = random_array(4, 1)
    op = operator_of("broadcast_in_dim", function, x)
    assert factor_table(op) == {
        "d0": ((REPLICATED,), (0,)),
        "d1": ((0,), (1,)),
        "d2": ((REPLICATED,), (2,)),
        "d3": ((REPLICATED,), (3,)),
        "sum0": ((SUM,), (SUM,)),
    }
    reached = check_every_strategy(function, x)
    assert reached["broadcast_in_dim"] == {"-", *factor_table(op)}
    check_every_strategy(lambda x: jnp.broadcast_to(x[0, 0], (3, 8)), x)
    check_every_strategy(lambda x: lax.expand_dims(x, (0, 3)), x)


@pytest.mark.parametrize(
    ("value", "is_pending"), [(0.0, True), (1.0, False), (np.int32(0), False)]
)
def test_a_literal_zero_is_a_pending_sum(value: Any, is_pending: bool) -> None:
    def function() -> jax.Array:
        return lax.broadcast_in_dim(value, (4, 8), ())

    reached = check_every_strategy(function)
    assert reached["broadcast_in_dim"] == {"-", "d0", "d1"} | (
        {"zero"} if is_pending else set()
    )


def test_tile_deals_out_copies() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jnp.tile(x, (4, 1, 2))

    x = random_array(2, 4, 3)
    op = operator_of("tile", function, x)
    assert factor_table(op) == {
        "d0": ((REPLICATED,), (0,)),
        "d1": ((1,), (1,)),
        "d2": ((REPLICATED,), (2,)),
        "sum0": ((SUM,), (SUM,)),
    }
    assert factor_sizes(op) == {"d0": 4, "d1": 4, "d2": 2, "sum0": 0}
    check_every_strategy(function, x)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_iota(dtype: str, dim: int) -> None:
    def function() -> jax.Array:
        return lax.broadcasted_iota(jnp.dtype(dtype), (8, 6), dim)

    for mesh in (MESH_8, MESH_2X4):
        reached = check_every_strategy(function, mesh=mesh)
        assert "d0" in reached["iota"]
    check_every_strategy(lambda: lax.iota(jnp.dtype(dtype), 1))


def test_iota_beyond_what_the_dtype_counts_exactly() -> None:
    check_every_strategy(lambda: lax.iota(jnp.bfloat16, 4096), mesh=MESH_8)


def test_integers_and_booleans_have_no_sums() -> None:
    for dtype in (np.int32, np.bool_):
        x = random_array(4, 2).astype(dtype)
        op = operator_of("reshape", lambda x: lax.reshape(x, (8,)), x)
        assert set(factor_table(op)) == {"d0"}
        check_every_strategy(lambda x: lax.reshape(x.T, (8,)), x)
