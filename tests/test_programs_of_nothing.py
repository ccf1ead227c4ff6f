"""Programs of no operators, arguments or elements: planned and run all the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from tests.like_jit import assert_same
from tests.tiny_plans import format_plan

X = jnp.arange(16.0).reshape(8, 2)


def scanned_cond(x: jax.Array) -> Any:
    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[()]]:
        return lax.cond(row.sum() > 9, lambda c: c, lambda c: c, carry), ()

    return lax.scan(body, x, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "nothing": (lambda: (), ()),
    "constant": (lambda: jnp.float32(1), ()),
    "literal": (lambda x: jnp.asarray(3.0), (X,)),
    "identity": (lambda x: x, (X,)),
    "twice": (lambda x: (x, x), (X,)),
    "unused argument": (lambda x, y: x + 1, (X, X)),
    "no argument used": (lambda x: jnp.zeros(3), (X,)),
    "empty tree": (lambda tree: tree, ({},)),
    "branches that pass": (
        lambda x: lax.cond(x[0, 0] > 0, lambda a: a, jnp.copy, x),
        (X,),
    ),
    "branches that make": (
        lambda x: lax.cond(
            x[0, 0] > 0, lambda _: jnp.ones(3), lambda _: jnp.zeros(3), x
        ),
        (X,),
    ),
    "scan that passes": (lambda x: lax.scan(lambda c, row: (c, row), x, x), (X,)),
    "scan of no rounds": (
        lambda x: lax.scan(lambda c, _: (c, None), x, None, length=0),
        (X,),
    ),
    "cond in a scan": (scanned_cond, (X,)),
    "while that passes": (
        lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, x)
        ),
        (X,),
    ),
    "while of no rounds": (
        lambda x: lax.while_loop(lambda _: False, lambda c: c, x),
        (X,),
    ),
    "no elements": (lambda x: x * 2, (jnp.zeros((0, 3)),)),
    "scalar": (lambda x: x + 1, (jnp.float32(2),)),
    "jit that passes": (lambda x: jax.jit(lambda y: y)(x), (X,)),
    "checkpoint that passes": (lambda x: jax.checkpoint(lambda y: y)(x), (X,)),
    "key": (jax.random.split, (jax.random.key(0),)),
}


MESHES = ("x:8", "x:4;y:2")
ON_MESHES = [
    pytest.param(name, mesh, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
    for i, name in enumerate(PROGRAMS)
    for j, mesh in enumerate(MESHES)
]


@pytest.mark.parametrize(("name", "mesh"), ON_MESHES)
def test_it_runs_as_under_jit(name: str, mesh: str) -> None:
    function, args = PROGRAMS[name]
    step = autopar.parallelize(function, mesh=mesh, donate_argnums=())
    assert_same(step(*args), jax.jit(function)(*args))


def trained(x: jax.Array, y: jax.Array) -> None:
    _ = x - jax.grad(lambda w: jnp.mean((y @ w.T) ** 2))(x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (trained, "but it returns nothing: JAX drops work"),
        (lambda x, y: (x * 2, 0.0), "depends on its batch, y: JAX drops work"),
        (lambda x, y: (x * 2, y.sum()), ""),
        (lambda x, y: jax.debug.print("{}", (x @ y.T).sum()), ""),
        (lambda x, y: (x, y), ""),
    ],
)
def test_work_that_is_not_returned_is_told(
    function: Callable[..., Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = autopar.parallelize(function, mesh="x:8").plan(X, X[:, :1] * X)
    assert why in caplog.text and ("should return" in caplog.text) == bool(why)
    assert "% of the heavy flops" not in format_plan(plan.sharding) or not why
    if not plan.predicted.step_seconds:
        assert plan.predicted.gap_words == "none: the step takes no time"


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_fits_a_budget(name: str) -> None:
    function, args = PROGRAMS[name]
    step = autopar.parallelize(function, mesh="x:8", memory_budget=10**6)
    assert step.plan(*args).predicted.peak_bytes <= 10**6
