"""Pooling: windows, strides, padding; forward, backward and forward-mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)

IMAGES = random_array(4, 6, 6, 2)


WINDOWS = {"window1", "window2"}


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mean_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9


def test_every_dim_is_parallel() -> None:
    op = operator_of("reduce_window_sum", mean_pool, IMAGES)
    assert factor_table(op) == {
        "d0": ((0,), (0,)),
        "window1": ((1,), (1,)),
        "window2": ((2,), (2,)),
        "d3": ((3,), (3,)),
        "sum0": ((SUM,), (SUM,)),
    }
    op = operator_of("reduce_window_max", max_pool, IMAGES)
    assert set(factor_table(op)) == {"d0", "d3", *WINDOWS}


def test_forward_and_backward() -> None:
    for pool, kind in ((max_pool, "max"), (mean_pool, "sum")):
        gradient = jax.grad(lambda x, pool=pool: (pool(x) ** 2).sum())
        kinds = (f"reduce_window_{kind}",)
        check_every_strategy(gradient, IMAGES, kinds=kinds, max_strategies=24)
    reached = check_every_strategy(
        jax.grad(lambda x: (max_pool(x) ** 2).sum()),
        IMAGES,
        kinds=("select_and_scatter_add",),
    )
    # Three windows in a dim are no even number; `test_halos.py` has dims that are.
    assert reached["select_and_scatter_add"] == {"-", "d0", "d3", "sum0"}


def test_forward_mode() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.jvp(max_pool, (x,), (jnp.cos(x),))[1]

    kinds = ("select_and_gather_add",)
    reached = check_every_strategy(function, IMAGES, kinds=kinds)
    assert reached["select_and_gather_add"] == {"-", "d0", "d3", "sum0"}


@pytest.mark.parametrize(
    ("window", "stride", "padding"), [(2, 2, "VALID"), (3, 1, "SAME"), (3, 2, "SAME")]
)
@pytest.mark.parametrize("largest", [True, False])
def test_forward_mode_of_pools(
    window: int, stride: int, padding: str, largest: bool
) -> None:
    def pool(x: jax.Array) -> jax.Array:
        start, choose = (-jnp.inf, lax.max) if largest else (jnp.inf, lax.min)
        sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
        return lax.reduce_window(x, start, choose, sizes, strides, padding)

    check_every_strategy(
        lambda x: jax.jvp(pool, (x,), (jnp.cos(x),))[1],
        random_array(2, 16, 8, 1),
        kinds=("select_and_gather_add",),
        max_strategies=12,
    )


def test_windows_that_do_not_keep_pace_make_a_dim_whole() -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        ones = (1, 1, 1, 1)
        pads = ((0, 0), (1, 0), (0, 0), (0, 0))
        return [
            lax.reduce_window(x, 0.0, lax.add, ones, (4, 1, 1, 1), "VALID"),
            lax.reduce_window(x, jnp.inf, lax.min, ones, ones, pads),
        ]

    reached = check_every_strategy(function, IMAGES, max_strategies=24)
    assert reached["reduce_window_sum"] == {"-", "d1", "d2", "d3", "sum0"}
    assert reached["reduce_window_min"] == {"-", "d0", "d2", "d3"}


def test_a_reduction_of_ones_own() -> None:
    def function(x: jax.Array) -> jax.Array:
        window = (1, 2, 1, 1)
        start = np.float32(1)
        return lax.reduce_window(
            x, start, lambda a, b: a * b + 0 * a, window, (1, 1, 1, 1), "VALID"
        )

    op = operator_of("reduce_window", function, IMAGES)
    assert factor_table(op)["d2"] == ((2, REPLICATED), (2,))
    check_every_strategy(function, IMAGES, max_strategies=24)
