"""Products are made in the order of dims that they are read in: values, and traffic."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import autopar
from autopar.frontend.tracing import trace
from autopar.frontend.transposed_products import with_transposed_products
from tests.rows.running import run_as_planned

Function = Callable[..., Any]
X, G = np.random.default_rng(0).normal(size=(2, 6, 4, 8)).astype(np.float32)
BATCHED = ((2,), (2,)), ((0,), (0,))  # [6, 4, 4] from [6, 4, 8] twice
ROWS = ((0, 1), (0, 1)), ((), ())  # [8, 8]


def product(x: jax.Array, g: jax.Array, dims: Any = ROWS, **more: Any) -> jax.Array:
    return lax.dot_general(x, g, dims, **more)


def turned(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x, g).T


def batched(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x, g[:, :3], BATCHED).transpose(0, 2, 1)


def several_dims(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x[0], g, (((1,), (2,)), ((), ()))).transpose(1, 2, 0)


def turned_twice(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.transpose(turned(x, g), (1, 0))


def per_operand(x: jax.Array, g: jax.Array) -> jax.Array:
    highest, default = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    return product(x, g, precision=(highest, default)).T


def read_twice(x: jax.Array, g: jax.Array) -> jax.Array:
    whole = product(x, g)
    return whole.T + whole


def returned_too(x: jax.Array, g: jax.Array) -> Any:
    whole = product(x, g)
    return whole, whole.T


def mixed(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x[0], g, (((1,), (2,)), ((), ()))).transpose(1, 0, 2)


def batch_moved(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x, g, BATCHED).transpose(2, 0, 1)


def by_algorithm(x: jax.Array, g: jax.Array) -> jax.Array:
    return product(x, g, precision=lax.DotAlgorithmPreset.F32_F32_F32).T


@pytest.mark.parametrize(
    ("function", "num_left"),
    [
        (turned, 0),
        (batched, 0),
        (several_dims, 0),
        (turned_twice, 0),
        (per_operand, 0),
        (read_twice, 1),
        (returned_too, 1),
        (mixed, 1),
        (batch_moved, 1),
        (by_algorithm, 1),
    ],
)
def test_values_stay_and_only_exchanged_operands_are_exchanged(
    function: Function, num_left: int
) -> None:
    closed = jax.make_jaxpr(function)(X, G)
    rewritten = with_transposed_products(closed)
    for got, want in zip(_run(rewritten), _run(closed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert _count(rewritten)["transpose"] == num_left
    assert _count(rewritten)["dot_general"] == _count(closed)["dot_general"]


def test_what_is_asked_of_one_operand_goes_with_it() -> None:
    (product,) = with_transposed_products(jax.make_jaxpr(per_operand)(X, G)).eqns
    assert product.params["precision"] == (
        lax.Precision.DEFAULT,
        lax.Precision.HIGHEST,
    )


def in_a_scan(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.scan(lambda sum_, _: (sum_ + turned(x, g), None), jnp.eye(8), None, 2)[0]


def in_a_branch(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, turned, lambda x, g: turned(g, x), x, g)


def in_a_while(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.fori_loop(
        0, x.astype(int)[0, 0, 0] + 2, lambda _, y: turned(y, g)[:6, None] + x, x
    )


def under_jit_and_remat(x: jax.Array, g: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.sin(jax.checkpoint(jnp.matmul)(x, w)).sum())(
        g[0].reshape(8, 4)
    )


def of_own_derivative(x: jax.Array, g: jax.Array) -> jax.Array:
    scaled: Any = jax.custom_vjp(lambda w: x @ w)
    scaled.defvjp(lambda w: (x @ w, None), lambda _, g: (2 * turned(g, x),))
    return jax.grad(lambda w: jnp.sin(scaled(w)).sum())(g[0].reshape(8, 4))


@pytest.mark.parametrize(
    "function",
    [in_a_scan, in_a_branch, in_a_while, under_jit_and_remat, of_own_derivative],
)
def test_bodies_and_calls_are_rewritten_where_they_are(function: Function) -> None:
    closed = trace(function, (X, G), {}).jaxpr
    assert str(jax.make_jaxpr(function)(X, G)).count("= transpose[") > 0
    assert str(closed).count("= transpose[") == 0
    (want,) = jax.tree.leaves(jax.jit(function)(X, G))
    np.testing.assert_allclose(_run(closed)[0], want, rtol=1e-5, atol=1e-4)


def test_what_devices_do_on_their_own_stays() -> None:
    own = jax.shard_map(
        turned,
        mesh=AbstractMesh((2,), ("x",)),
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    closed = jax.make_jaxpr(own)(X, G)
    assert with_transposed_products(closed) is closed


def test_a_jaxpr_without_such_products_is_returned_as_it_is() -> None:
    closed = jax.make_jaxpr(jax.jit(mixed))(X, G)
    assert with_transposed_products(closed) is closed


def test_weight_gradients_are_scattered_without_a_copy() -> None:
    """Devices share the dim that is stored first, so parts lie as they are sent."""

    def step(w: Any, m: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

        gradients = jax.grad(loss)(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m

    draw = np.random.default_rng(1)
    w = [draw.normal(size=(64, 128)), draw.normal(size=(128, 64))]
    w = [jnp.asarray(each, jnp.float32) for each in w]
    x = jnp.asarray(draw.normal(size=(16, 8, 64)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    planned = autopar.parallelize(step, mesh=mesh, method=autopar.Zero(2))
    compiled = run_as_planned(planned, w, jax.tree.map(jnp.zeros_like, w), x)
    scattered = [
        line for line in compiled.as_text().splitlines() if " reduce-scatter(" in line
    ]
    assert len(scattered) == 2
    for line in scattered:
        assert "dimensions={0}" in line
        assert not re.search(r"reduce-scatter\(%?(copy|transpose)", line)


def _run(closed: Any) -> Any:
    return jax.jit(jaxpr_as_fun(closed))(X, G)


def _count(closed: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in closed.eqns)
