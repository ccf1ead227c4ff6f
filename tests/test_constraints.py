"""What a step asks for inside: `autopar.pin` and sharding constraints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.sharding.spec import to_partition_spec
from tests.rules.strategy_oracle import random_array

P = PartitionSpec
X = random_array(8, 16)
W = random_array(16, 32, seed=1)


def pinned(spec: PartitionSpec) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(autopar.pin(x @ w, spec)).sum()

    return step


def specs(plan: autopar.Plan, kind: str) -> list[PartitionSpec]:
    """Where the results of the operators of a kind lie."""
    tensors = {tensor.name: tensor for tensor in plan.sharding.tensors}
    names = plan.sharding.mesh.axis_names
    return [
        to_partition_spec(op.result_specs[0], len(tensors[op.name].shape), names)
        for op in plan.sharding.operators
        if op.kind == kind
    ]


@pytest.mark.parametrize(
    "spec", [P("x", "y"), P("y"), P(None, ("x", "y")), P(), P("y", "x")]
)
def test_a_pinned_tensor_lies_as_it_says(spec: PartitionSpec) -> None:
    step = pinned(spec)
    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    assert specs(parallel.plan(X, W), "autopar_pin") == [spec]
    np.testing.assert_allclose(parallel(X, W), jax.jit(step)(X, W), 1e-4)
    parallel.lower(X, W).compile().audit().raise_if_wrong()


def test_a_free_dim_is_the_solvers() -> None:
    parallel = autopar.parallelize(pinned(P(autopar.FREE, "y")), mesh="x:2;y:4")
    (spec,) = specs(parallel.plan(X, W), "autopar_pin")
    assert spec[1] == "y"


def test_a_pin_does_nothing_elsewhere() -> None:
    def plain(x: Any) -> jax.Array:
        return jnp.sin(x * 2)

    def with_pin(x: Any) -> jax.Array:
        return jnp.sin(autopar.pin(x * 2, P("nowhere")))

    x = X[:2, :4]
    for transform in (jax.jit, jax.vmap, jax.jacobian, jax.jacfwd, jax.checkpoint):
        found, expected = transform(with_pin)(x), transform(plain)(x)
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(with_pin(X), plain(X))
    text = jax.jit(with_pin).lower(X).as_text()
    assert "autopar" not in text and "sharding" not in text
    tree = autopar.pin({"a": X, "b": 1}, P())
    np.testing.assert_array_equal(tree["a"], X)


def test_a_pin_under_vmap_and_grad() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda row: autopar.pin(row @ w, P("y")))(x)
        return jnp.sum(rows**2)

    gradient = jax.grad(loss)
    parallel = autopar.parallelize(gradient, mesh="x:2;y:4")
    found = specs(parallel.plan(W, X), "autopar_pin")
    assert len(found) == 2 and all(spec[1] == "y" for spec in found)
    np.testing.assert_allclose(parallel(W, X), jax.jit(gradient)(W, X), 1e-4, 1e-4)


def test_a_pin_in_a_scan() -> None:
    def step(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return autopar.pin(jnp.tanh(c), P(None, "x")), None

        return jax.lax.scan(body, x, None, length=3)[0]

    parallel = autopar.parallelize(step, mesh="x:8")
    assert specs(parallel.plan(X), "autopar_pin") == [P(None, "x")]
    np.testing.assert_allclose(parallel(X), jax.jit(step)(X), 1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("z"), "'z'"),
        (P("x", "x"), "twice"),
        (P(("y", "y")), "twice"),
        (P("x", None, "y"), "drop 1"),
    ],
)
def test_a_wrong_pin_is_an_error_with_its_line(spec: PartitionSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        autopar.parallelize(pinned(spec), mesh="x:2;y:4").plan(X, W)


def test_a_pin_that_does_not_divide_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"autopar\.pin at .*test_constraints\.py"):
        autopar.parallelize(pinned(P("x")), mesh="x:8").plan(X[:4], W)


def test_a_pin_must_be_a_partition_spec() -> None:
    with pytest.raises(TypeError, match=r"PartitionSpec.*'x'"):
        autopar.pin(X, "x")  # type: ignore[arg-type]


def constrained(sharding: object) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(x @ w, sharding)
        return jnp.tanh(hidden).sum()

    return step


def auto_mesh(*names: str) -> Mesh:
    return jax.make_mesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)


def test_a_sharding_constraint_is_followed() -> None:
    step = constrained(NamedSharding(auto_mesh("x", "y"), P("y", "x")))
    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    assert specs(parallel.plan(X, W), "sharding_constraint") == [P("y", "x")]
    np.testing.assert_allclose(parallel(X, W), jax.jit(step)(X, W), 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_bare_spec_under_a_set_mesh_is_followed(kind: AxisType) -> None:
    step = constrained(P("y", P.UNCONSTRAINED))
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    expected = np.tanh(X @ W).sum()
    with jax.set_mesh(mesh):
        parallel = autopar.parallelize(step, mesh=mesh)
        (spec,) = specs(parallel.plan(X, W), "sharding_constraint")
        value = parallel(X, W)
    assert spec[0] == "y"
    np.testing.assert_allclose(value, expected, 1e-4)


@pytest.mark.parametrize("spec", [P("a"), P(None, ("a", "b"))])
def test_a_constraint_on_other_axes_is_ignored_with_one_warning(
    spec: PartitionSpec,
) -> None:
    step = constrained(NamedSharding(auto_mesh("a", "b"), spec))
    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = parallel(X, W)
        parallel(X, W)
    (warning,) = (w for w in caught if issubclass(w.category, autopar.FallbackWarning))
    text = str(warning.message)
    assert "test_constraints.py" in text and "'a'" in text and "ignored" in text
    np.testing.assert_allclose(value, jax.jit(step)(X, W), 1e-4)


def test_an_edited_plan_must_keep_a_pin() -> None:
    parallel = autopar.parallelize(pinned(P("x")), mesh="x:8")
    other = autopar.parallelize(pinned(P(None, "x")), mesh="x:8")
    plan = parallel.plan(X, W)
    with pytest.raises(autopar.errors.PlanFileError, match="asks for"):
        autopar.parallelize(pinned(P(None, "x")), plan=plan)(X, W)
    assert other.plan(X, W) is not plan
