"""Zero padding is part of the windows that read it: as values, and split in space."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

import autopar
from autopar.frontend.padded_windows import with_padded_windows
from autopar.frontend.tracing import trace
from tests.rows.running import run_as_planned, traffic

NAMES = ("NHWC", "HWIO", "NHWC")


def mean_pool(x: jax.Array, window: int, stride: int, padding: str) -> jax.Array:
    shape, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, 0.0, lax.add, shape, strides, padding) / window**2


def padded(x: jax.Array, w: jax.Array) -> jax.Array:
    wider = lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (2, 0, 1), (0, 0, 0)))
    return lax.conv_general_dilated(wider, w, (1, 1), "VALID", dimension_numbers=NAMES)


def twice_read(x: jax.Array, w: jax.Array) -> jax.Array:
    wider = lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)))
    y = lax.conv_general_dilated(wider, w, (1, 1), "VALID", dimension_numbers=NAMES)
    return y + wider.sum()


def features_padded(x: jax.Array, w: jax.Array) -> jax.Array:
    wider = lax.pad(x[..., :1], 0.0, ((0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 1, 0)))
    return lax.conv_general_dilated(wider, w, (1, 1), "SAME", dimension_numbers=NAMES)


def padded_with_ones(x: jax.Array, w: jax.Array) -> jax.Array:
    wider = lax.pad(x, 1.0, ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)))
    return lax.conv_general_dilated(wider, w, (1, 1), "VALID", dimension_numbers=NAMES)


def in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda y, _: (padded(y, w)[:, :, :8, :2], None), x, None, 2)[0]


def both(function: Any) -> Any:
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))


def operands() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = (1, 8, 8, 2), (3, 3, 2, 2)
    x, w = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, w


@pytest.mark.parametrize(
    ("function", "num_pads"),
    [
        (padded, 0),
        (twice_read, 1),
        (features_padded, 1),
        (padded_with_ones, 1),
        (in_a_loop, 0),
        (lambda x, w: mean_pool(x, 3, 2, "SAME") * w.sum(), 0),
        (both(lambda x, w: mean_pool(x, 3, 2, "SAME") * w.sum()), 0),
        (both(lambda x, w: mean_pool(x, 2, 2, "VALID") * w.sum()), 0),
    ],
    ids="padded twice features ones loop pool pool_grad patches_grad".split(),
)
def test_values_stay_and_only_what_windows_can_pad_is_folded(
    function: Any, num_pads: int
) -> None:
    args = operands()
    closed = jax.make_jaxpr(function)(*args)
    folded = with_padded_windows(closed)
    run, run_folded = (jax.jit(jaxpr_as_fun(j)) for j in (closed, folded))
    for got, want in zip(run_folded(*args), run(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert str(trace(function, args, {}).jaxpr).count("= pad[") == num_pads


def test_a_jaxpr_without_padding_is_returned_as_it_is() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(np.ones(3))
    assert with_padded_windows(closed) is closed


@pytest.mark.parametrize(
    ("window", "stride", "padding", "sent"),
    [(2, 2, "VALID", []), (3, 1, "SAME", [1_024] * 4), (3, 2, "SAME", [1_024, 512])],
)
def test_mean_pools_and_their_gradients_are_split_in_space(
    window: int, stride: int, padding: str, sent: list[int]
) -> None:
    """A row of 16 x 16 numbers each way; of gradients one as long as the result's."""

    def function(scale: jax.Array, x: jax.Array) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum((scale * mean_pool(x, window, stride, padding)) ** 2)

        return jax.value_and_grad(loss)(x)

    names = {"x": "batch height width channels"}
    step = autopar.parallelize(
        function,
        mesh=Mesh(np.array(jax.devices()[:4]), ("h",)),
        rules=autopar.LayoutRules("height:h", names),
    )
    x = np.random.default_rng(0).normal(size=(1, 16, 16, 16)).astype(np.float32)
    found = traffic(run_as_planned(step, jnp.float32(2), jnp.asarray(x)).plan)
    assert found.pop(("all_reduce", "h")) == [4]
    assert found == ({("collective_permute", "h"): sent} if sent else {})
