"""Products of grouped rows: rows, groups and features split, and their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_table,
    operators_of,
    random_array,
)

KIND = ("ragged_dot_general",)
# Whether or not they fill the 16 rows; some groups are empty, some lie across shards.
SIZES = {
    "uneven": [3, 0, 5, 1, 0, 0, 6, 1],
    "one": [0, 0, 16, 0, 0, 0, 0, 0],
    "fewer": [1, 2, 0, 3, 0, 1, 0, 2],
    "more": [9, 0, 0, 4, 7, 0, 3, 1],
}


def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def gradients(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (product(x, w, sizes) ** 2).sum()

    return jax.grad(loss, (0, 1))(x, w)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return random_array(16, 4), random_array(8, 4, 6, seed=1)


def test_factors_of_a_product_and_its_gradients() -> None:
    given = (*arrays(), np.array(SIZES["one"], np.int32))
    first, by_matrices, by_rows = (
        factor_table(op)
        for op in operators_of(gradients, *given)
        if op.kind == "ragged_dot_general"
    )
    assert first == {
        "n2": ((REPLICATED, 2, REPLICATED), (1,)),
        "k0": ((1, 1, REPLICATED), (SUM,)),
        "rows": ((0, REPLICATED, REPLICATED), (0,)),
        "groups": ((REPLICATED, 0, REPLICATED), (SUM,)),
        "sum0": ((SUM, REPLICATED, REPLICATED), (SUM,)),
        "sum1": ((REPLICATED, SUM, REPLICATED), (SUM,)),
    }
    assert by_rows["rows"] == first["rows"]
    assert by_rows["groups"] == first["groups"]
    assert by_matrices["rows"] == ((0, 0, REPLICATED), (SUM,))
    assert by_matrices["groups"] == ((REPLICATED,) * 3, (0,))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_shard_works_on_the_rows_of_its_groups(sizes: list[int]) -> None:
    given = (*arrays(), np.array(sizes, np.int32))
    reached = check_every_strategy(
        gradients, *given, kinds=KIND, mesh=MESH_2X4, max_strategies=10
    )
    assert {"rows", "groups"} <= reached["ragged_dot_general"]


def test_a_group_on_each_device() -> None:
    sizes = np.array(SIZES["uneven"], np.int32)
    check_every_strategy(gradients, *arrays(), sizes, kinds=KIND, mesh=MESH_8)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_sizes_of_any_integer_type_and_rows_that_are_no_numbers(dtype: str) -> None:
    """What lies behind the last group is not read, nor is it passed on."""
    x, w = arrays()
    x[-7:] = np.nan
    reached = check_every_strategy(
        product,
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(w, jnp.bfloat16),
        np.array(SIZES["fewer"], dtype),
        kinds=KIND,
        max_strategies=10,
    )
    assert {"rows", "groups", "n2"} <= reached["ragged_dot_general"]


def test_other_orders_of_dims_and_batches() -> None:
    """Rows last, groups last, and a batch of both before them."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((0,), (0,))),
        lhs_ragged_dimensions=[2],
        rhs_group_dimensions=[3],
    )

    def function(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(x, w, sizes, numbers)

    given = random_array(2, 4, 16), random_array(2, 4, 6, 8, seed=1)
    reached = check_every_strategy(
        function,
        *given,
        np.array(SIZES["uneven"], np.int32),
        kinds=KIND,
        max_strategies=16,
    )
    assert {"b0", "rows", "groups", "n2", "k0"} <= reached["ragged_dot_general"]


def test_sizes_of_each_batch_stay_whole() -> None:
    sizes = np.array([SIZES["one"], SIZES["uneven"]], np.int32)
    (op,) = (
        op
        for op in operators_of(
            jax.vmap(product), random_array(2, 16, 4), random_array(2, 8, 4, 6), sizes
        )
        if op.kind == "ragged_dot_general"
    )
    assert set(factor_table(op)) == {"sum0", "sum1"}
