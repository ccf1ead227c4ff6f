"""Windows that overlap where a dim is cut: halos of every kind, against one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.rules.base import factors_of
from tests.marks import slow
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_table,
    operators_of,
    random_array,
)

CONV = "conv_general_dilated"


def both_gradients(convolve: Any, left: np.ndarray, right: np.ndarray) -> Any:
    """The result of a convolution, and gradients of a weighted sum of its squares."""
    weights = random_array(*jax.eval_shape(convolve, left, right).shape, seed=2)

    def function(x: jax.Array, w: jax.Array) -> Any:
        return jax.grad(lambda x, w: jnp.sum(convolve(x, w) ** 2 * weights), (0, 1))(
            x, w
        )

    return function


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "left", "right"),
    [
        (4, 1, "SAME", 1, 1),
        (1, 2, "VALID", 1, 1),
        (3, 1, "SAME", 1, 2),
        (3, 4, [(0, 0)], 1, 1),
        (4, 1, [(2, 2)], 2, 1),
        (5, 2, [(4, 0)], 1, 1),
        (5, 1, [(-1, 5)], 1, 1),
        *(
            slow(*each, 1)
            for each in (
                (3, 1, "SAME", 1),
                (5, 1, "SAME", 1),
                (3, 2, "SAME", 1),
                (3, 2, [(1, 1)], 1),
                (2, 2, "VALID", 1),
                (3, 1, [(2, 1)], 2),
            )
        ),
    ],
    ids=str,
)
def test_a_dim_of_a_convolution_and_of_its_gradients(
    kernel: int, stride: int, padding: Any, left: int, right: int
) -> None:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (stride,), padding, (left,), (right,), ("NWC", "WIO", "NWC")
        )

    x, w = random_array(1, 16, 2), random_array(kernel, 2, 3, seed=1)
    reached = check_every_strategy(
        both_gradients(convolve, x, w),
        x,
        w,
        kinds=(CONV,),
        mesh=MESH_2X4,
        max_strategies=16,
    )
    assert reached[CONV] >= {"window1"}
    assert any(name.startswith("taps") for name in reached[CONV])


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [
        (3, 2, "SAME"),
        slow(3, 1, "SAME"),
        slow(2, 2, "VALID"),
        slow(4, 2, [(1, 1)]),
        (2, 4, "VALID"),
        slow(5, 2, [(2, 1)]),
    ],
    ids=str,
)
def test_a_dim_of_a_pool_and_of_its_gradient(
    window: int, stride: int, padding: Any
) -> None:
    """Ties are common: of equal elements the first in the window is taken."""
    x = np.round(random_array(1, 16, 2))

    def pool(x: jax.Array, start: Any, combine: Any) -> jax.Array:
        pads = padding if isinstance(padding, str) else [(0, 0), *padding, (0, 0)]
        shape, strides = (1, window, 1), (1, stride, 1)
        return lax.reduce_window(x, start, combine, shape, strides, pads)

    def unpool(y: jax.Array) -> jax.Array:
        """The gradient of a mean: windows over what is spread apart."""
        pads, spread = (window - 1, stride - 1), (1, stride, 1)
        return lax.reduce_window(
            y, 0.0, lax.add, (1, window, 1), (1, 1, 1), [(0, 0), pads, (0, 0)], spread
        )

    def function(x: jax.Array) -> Any:
        def weighted(pooled: jax.Array) -> jax.Array:
            return (pooled * random_array(*pooled.shape, seed=3)).sum()

        bits = (2 * x).astype(jnp.int32)
        return (
            jax.grad(lambda x: weighted(pool(x, -jnp.inf, lax.max)))(x),
            jax.grad(lambda x: weighted(pool(x, jnp.inf, lax.min)))(x),
            pool(x, 0.0, lax.add),
            unpool(pool(x, 0.0, lax.add)),
            pool(bits, jnp.int32(0), lax.bitwise_xor),
            pool(bits, np.iinfo(np.int32).min, lax.max),
            pool(x > 0, True, lax.bitwise_and),
        )

    kinds = [f"reduce_window{each}" for each in ("", "_max", "_min", "_sum")]
    kinds.append("select_and_scatter_add")
    reached = check_every_strategy(
        function, x, mesh=MESH_2X4, kinds=kinds, max_strategies=12
    )
    for kind, names in reached.items():
        assert "window1" in names, kind


def test_two_dims_and_the_corners_between() -> None:
    x = random_array(1, 8, 8, 2)

    def function(x: jax.Array) -> Any:
        shape, strides = (1, 3, 3, 1), (1, 2, 2, 1)

        def pooled(x: jax.Array) -> jax.Array:
            return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, "SAME")

        weights = random_array(1, 4, 4, 2, seed=3)
        return jax.grad(lambda x: (pooled(x) * weights).sum())(x)

    kind = "select_and_scatter_add"
    reached = check_every_strategy(function, x, kinds=(kind,), max_strategies=12)
    assert {"window1", "window2"} <= reached[kind]


def test_a_halo_wider_than_a_shard_is_not_offered() -> None:
    """Five elements before and behind, of sixteen: shards of two parts hold eight."""

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    operands = random_array(1, 16, 2), random_array(11, 2, 3)
    (op,) = operators_of(convolve, *operands)
    (factor,) = (f for f in factors_of(op) if f.name == "window1")
    admitted = [n for n in range(1, 17) if factor.admits(n)]
    assert admitted == [1, 2]
    reached = check_every_strategy(convolve, *operands, mesh=MESH_8)
    assert "window1" not in reached[CONV]


def test_windows_that_do_not_keep_pace_are_not_split() -> None:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )

    (op,) = operators_of(convolve, random_array(1, 16, 2), random_array(3, 2, 3))
    assert set(factor_table(op)) == {"in_features", "out_features", "sum0", "sum1"}
