"""Rows of Colossal-AI's tensor parallelism in two dims and two and a half, on F7.

The product in one dim (COL-1) is Megatron's: `test_megatron.py`.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Case, random
from tests.rows.running import homes, run_as_planned, traffic

X_BYTES, W_BYTES, Y_BYTES = 64 * 128 * 4, 128 * 256 * 4, 64 * 256 * 4


def devices(**sizes: int) -> Mesh:
    number = int(np.prod(list(sizes.values())))
    chosen = np.array(jax.devices()[:number])
    return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes))


def f7(x_spec: P, w_spec: P, y_spec: P) -> Case:
    """F7: X 64 x 128 by W 128 x 256, and both gradients, each as its operand lies."""

    def step(w: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(lambda x, w: x @ w, x, w)
        dx, dw = backward(dy)
        pairs = (y, y_spec), (dx, x_spec), (dw, w_spec)
        return [autopar.pin(value, spec) for value, spec in pairs]

    return Case(step, (random(1, 128, 256), random(0, 64, 128), random(2, 64, 256)))


@pytest.mark.parametrize("depth", [1, 2], ids=["2D", "2.5D"])
def test_col_2_and_3_operands_are_gathered_and_gradients_scattered(depth: int) -> None:
    """q = 2: X is gathered along its rows of devices, W along its columns. d = 2 splits
    the examples once more, and adds the gradients of W, which both halves have."""
    rows = ("d", "r") if depth > 1 else "r"
    x_spec, w_spec, y_spec = P(rows, "c"), P("r", "c"), P(rows, "c")
    case = f7(x_spec, w_spec, y_spec)
    mesh = devices(r=2, c=2) if depth == 1 else devices(d=2, r=2, c=2)
    step = autopar.parallelize(
        case.step,
        mesh=mesh,
        pins={"^x$": x_spec, "^w$": w_spec, "^dy$": y_spec},
        batch_argnums=(),
    )
    plan = run_as_planned(step, *case.args).plan
    expected = {
        ("all_gather", "c"): [X_BYTES // 2 // depth],
        ("all_gather", "r"): [W_BYTES // 2],
        ("reduce_scatter", "c"): [X_BYTES // 4 // depth],
        ("reduce_scatter", "r"): [W_BYTES // 4],
    }
    if depth > 1:
        expected["all_reduce", "d"] = [W_BYTES // 4]
    assert X_BYTES // 2 == 16_384
    assert W_BYTES // 2 == 65_536
    assert traffic(plan) == expected
    products = [op for op in plan.sharding.operators if op.kind == "dot_general"]
    assert [op.split for op in products] == [4 * depth] * 3
    assert homes(plan)["w"] == ((0, 1) if depth == 1 else (-1, 0, 1))
