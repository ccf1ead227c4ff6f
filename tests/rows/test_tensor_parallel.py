"""Rows of Colossal-AI's tensor parallelism in two to three dims, on F7.

The product in one dim (COL-1) is Megatron's: `test_megatron.py`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.clusters.cluster import Cluster
from autopar.steps.parallel_plan import Plan
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
def test_col_2_and_col_3_operands_are_gathered_and_gradients_scattered(
    depth: int,
) -> None:
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


CUBE = {"i": 2, "j": 2, "k": 2}
X_HOME, W_HOME, Y_HOME = P(("i", "j"), "k"), P(("k", "i"), "j"), P(("i", "k"), "j")
CUBE_PINS = {"^x$": X_HOME, "^w$": W_HOME, "^dy$": Y_HOME}
CUBE_TRAFFIC = {
    ("all_gather", "j"): [X_BYTES // 4],
    ("all_gather", "i"): [W_BYTES // 4],
    ("all_gather", "k"): [Y_BYTES // 4],
    ("reduce_scatter", "k"): [Y_BYTES // 8],
    ("reduce_scatter", "j"): [X_BYTES // 8],
    ("reduce_scatter", "i"): [W_BYTES // 8],
}


def cubic_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Operands gathered along one axis each, the sum scattered along the third."""
    x = autopar.relayout(x, P("i", "k"))
    w = autopar.relayout(w, P("k", "j"))
    return autopar.pin(x @ w, Y_HOME)


def assert_cubic(plan: Plan) -> None:
    """An eighth of everything on each device, and the row's six collectives."""
    assert traffic(plan) == CUBE_TRAFFIC
    assert sorted(sum(CUBE_TRAFFIC.values(), [])) == [
        *(4_096, 8_192, 8_192, 16_384, 16_384, 32_768)
    ]
    for each in plan.sharding.inputs:
        assert each.bytes * 8 == 4 * np.prod(each.shape), each.path
    products = [op for op in plan.sharding.operators if op.kind == "dot_general"]
    assert [op.split for op in products] == [8] * 3


def test_col_4_a_layer_that_says_where_its_operands_go() -> None:
    """Gradients go back to where the operands lay; no axis order suits all three."""

    def step(w: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(cubic_product, x, w)
        return y, *backward(dy)

    case, mesh = f7(X_HOME, W_HOME, Y_HOME), devices(**CUBE)
    parallel = autopar.parallelize(step, mesh=mesh, pins=CUBE_PINS, batch_argnums=())
    compiled = run_as_planned(parallel, *case.args)
    assert_cubic(compiled.plan)
    results = jax.tree.leaves(compiled.compiled.output_shardings)
    assert [each.spec for each in results] == [Y_HOME, X_HOME, W_HOME]


def test_col_4_is_the_solvers_own_where_bytes_count() -> None:
    """Of an unmodified product, where launches, which favour fewer collectives on
    arrays as small as these, are free."""
    case, mesh, cluster = f7(X_HOME, W_HOME, Y_HOME), devices(**CUBE), Cluster.local()
    link = replace(cluster.host_link, alpha_seconds=0.0)
    cluster = replace(cluster, launch_seconds=0.0, host_link=link)
    step = autopar.parallelize(
        case.step, mesh=mesh, pins=CUBE_PINS, batch_argnums=(), cluster=cluster
    )
    assert_cubic(run_as_planned(step, *case.args).plan)


def test_col_4_is_the_solvers_own_on_large_arrays() -> None:
    """Of an unmodified product of 4,096 rows by A100s: bytes are 64^2 times as many."""
    case = f7(X_HOME, W_HOME, Y_HOME)
    shapes = [[64 * size for size in array.shape] for array in case.args]
    step = autopar.parallelize(
        case.step,
        mesh=CUBE,
        pins=CUBE_PINS,
        batch_argnums=(),
        cluster=Cluster.preset("8xA100"),
    )
    plan = step.plan(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    expected = {key: [64**2 * size for size in v] for key, v in CUBE_TRAFFIC.items()}
    assert traffic(plan) == expected


def test_col_4_training_keeps_the_order_of_axes() -> None:
    """The update is made as the parameters lie: nothing is sent but for the product."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(cubic_product(x, w)) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    case, mesh = f7(X_HOME, W_HOME, Y_HOME), devices(**CUBE)
    parallel = autopar.parallelize(
        step, mesh=mesh, pins={"^x$": X_HOME, "^w$": W_HOME}, batch_argnums=()
    )
    plan = run_as_planned(parallel, *case.args[:2]).plan
    expected = {**CUBE_TRAFFIC, ("all_reduce", "i,j,k"): [4]}
    del expected["reduce_scatter", "j"]  # x has no gradient
    assert traffic(plan) == expected
