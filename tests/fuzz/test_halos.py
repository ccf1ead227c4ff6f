"""Windows that overlap shards, under random plans of a small network."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.sharding.mesh import MeshShape
from tests.fuzz.oracle import check_function
from tests.fuzz.plans import Case

NAMES = ("NHWC", "HWIO", "NHWC")


def network(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """A strided, a pooled and a transposed convolution, and all gradients."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x, params["down"], (2, 1), "SAME", dimension_numbers=NAMES
        )
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 2, 1), "SAME")
        pads = ((2, 1), (2, 1))
        y = lax.conv_general_dilated(
            y, params["up"], (1, 1), pads, (2, 2), dimension_numbers=NAMES
        )
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss, (0, 1))(params, x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mesh", [MeshShape(("x", "y"), (2, 4)), MeshShape(("x", "y", "z"), (2, 2, 2))]
)
def test_a_network_of_windows_under_random_plans(mesh: MeshShape, seed: int) -> None:
    draw = np.random.default_rng(0)
    shapes = {"down": (3, 3, 2, 4), "up": (3, 3, 4, 2)}
    params = {
        name: draw.normal(size=shape).astype(np.float32) / 4
        for name, shape in shapes.items()
    }
    x = draw.normal(size=(2, 16, 16, 2)).astype(np.float32)
    check_function(network, (params, x), Case(mesh, "uniform", seed))
