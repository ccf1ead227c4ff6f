"""Cumulative operators: shards of the dim that they run along hand on their totals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.running import run_as_planned, traffic
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)

X = random_array(4, 8, 2)
FUNCTIONS = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: [function(x, 1), function(x, 1, reverse=True)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_dim_is_split(function: Callable[..., Any]) -> None:
    reached = check_every_strategy(
        both_ways(function), X, mesh=MESH_2X4, max_strategies=8
    )
    ((kind, names),) = reached.items()
    sums = {"sum0"} if kind == "cumsum" else set()
    op = operator_of(kind, lambda x: function(x, 1), X)
    assert set(factor_table(op)) == {"d0", "along", "d2"} | sums
    assert factor_table(op)["along"] == ((1,), (1,))
    assert "along" in names


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_no_number_reaches_all_behind_it(function: Callable[..., Any]) -> None:
    x = random_array(8, 2)
    x[3, 0], x[5, 1], x[1, 1] = np.nan, np.inf, -np.inf
    check_every_strategy(lambda x: function(x, 0), x, mesh=MESH_8)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bfloat16", "complex64"])
def test_numbers_of_any_type(dtype: str) -> None:
    x = jnp.asarray(3 * X).astype(dtype)
    reached = check_every_strategy(both_ways(lax.cumsum), x, max_strategies=8)
    assert "along" in reached["cumsum"]


@pytest.mark.parametrize(("count", "exchanges"), [(2, 1), (3, 2), (4, 2), (8, 3)])
def test_totals_are_exchanged_in_as_many_steps_as_doublings(
    count: int, exchanges: int
) -> None:
    """A total is one row of 5 numbers."""

    def function(x: jax.Array) -> jax.Array:
        return autopar.pin(lax.cumsum(jnp.sin(x), 0, reverse=True), P("n"))

    mesh = Mesh(np.array(jax.devices()[:count]), ("n",))
    step = autopar.parallelize(function, mesh=mesh, pins={"x": P("n")})
    plan = run_as_planned(step, random_array(24 * 1200, 5)).plan
    assert traffic(plan) == {("collective_permute", "n"): [5 * 4] * exchanges}
