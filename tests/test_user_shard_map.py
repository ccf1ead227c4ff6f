"""A user's own shard_map runs as written, and its collectives are planned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import autopar
from tests.rules.strategy_oracle import random_array

P = PartitionSpec
X = random_array(8, 16)
W = random_array(16, 32, seed=1)


def mesh_2x4(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)


Step = Callable[..., object]


def matmul(check_vma: bool, mesh: Mesh | None = None) -> Step:
    """Rows over x, the contracted dim over y."""

    @partial(
        jax.shard_map,
        mesh=mesh or mesh_2x4(),
        in_specs=(P("x", "y"), P("y", None)),
        out_specs=P("x", None),
        check_vma=check_vma,
    )
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x @ w, "y")

    return lambda x, w: jnp.tanh(product(jnp.sin(x), w * 2)).sum()


def ring(check_vma: bool) -> Step:
    """Most collectives, in a scan, a branch, a call and a loop."""

    @partial(
        jax.shard_map,
        mesh=mesh_2x4(),
        in_specs=(P("x", "y"), P("y", None)),
        out_specs=(P("x", None), P(("x", "y")), P()),
        check_vma=check_vma,
    )
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        def turn(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.ppermute(carry, "y", [(i, (i + 1) % 4) for i in range(4)]), None

        turned, _ = lax.scan(turn, x, None, length=3)
        rows = lax.psum_scatter(turned @ w, "y", scatter_dimension=0, tiled=True)
        rows = lax.all_gather(rows, "y", axis=0, tiled=True)
        swapped = lax.all_to_all(x, "y", split_axis=0, concat_axis=1, tiled=True)
        big = lax.pmax(jnp.abs(x).max(), ("x", "y"))
        branch = lax.cond(
            big > 100, lambda v: v * 2, lambda v: v + jax.jit(jnp.sin)(v), swapped
        )
        index = lax.axis_index("x").astype(x.dtype)
        summed = lax.psum(rows * index, "x") + rows
        return lax.pmax(summed, "y"), branch, big

    return lambda x, w: body(x * 2, jnp.cos(w))


def check(step: Step, *args: Any, mesh: str = "x:2;y:4") -> autopar.Plan:
    parallel = autopar.parallelize(step, mesh=mesh)
    expected = jax.jit(step)(*args)
    found = parallel(*args)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4)
    parallel.lower(*args).compile().audit().raise_if_wrong()
    return parallel.plan(*args)


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_runs_as_written_and_its_sum_is_planned(check_vma: bool) -> None:
    plan = check(matmul(check_vma), X, W)
    sums = [c for c in plan.sharding.collectives if c.source.startswith("shard_map")]
    assert [(c.kind, c.bytes, len(c.groups)) for c in sums] == [
        ("all_reduce", 4 * 32 * 4, 2)
    ]
    (op,) = (op for op in plan.sharding.operators if op.kind == "shard_map")
    assert op.flops == 2 * 8 * 16 * 32 and op.split == 8 and op.seconds > 0
    assert op.operand_specs == ((0, 1), (-1, 0)) and op.result_specs == ((0, -1),)


@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_in_loops_and_branches(check_vma: bool) -> None:
    plan = check(ring(check_vma), X, W)
    own = [c for c in plan.sharding.collectives if c.source.startswith("shard_map")]
    permutes = [c for c in own if c.kind == "collective_permute"]
    assert [c.count for c in permutes] == [3]
    assert {c.kind for c in own} == {
        "all_reduce",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "collective_permute",
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_its_gradient(check_vma: bool) -> None:
    check(jax.grad(matmul(check_vma), argnums=(0, 1)), X, W)


def test_its_gradient_with_remat_and_custom_derivatives() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return x * 2

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g * 3,))

    @partial(jax.shard_map, mesh=mesh_2x4(), in_specs=(P("x"), P()), out_specs=P("x"))
    @jax.checkpoint
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jax.nn.relu(scaled(x)) @ w)

    check(jax.grad(lambda x, w: body(x, w).sum(), argnums=1), X, W)


def test_it_runs_in_a_scan_as_often_as_the_scan_says() -> None:
    body = jax.shard_map(
        lambda x: x + lax.pmean(x, "x"),
        mesh=mesh_2x4(),
        in_specs=P("x"),
        out_specs=P("x"),
    )

    def step(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (body(c), None), x, None, length=5)[0]

    plan = check(step, X)
    own = [c for c in plan.sharding.collectives if c.source.startswith("shard_map")]
    assert [c.count for c in own] == [5]


def test_axes_that_it_does_not_have_hold_replicas() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    body = jax.shard_map(
        lambda x: lax.all_gather(x, "x", tiled=True),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
        check_vma=False,
    )
    parallel = autopar.parallelize(lambda x: body(x) + 1, mesh="x:2;y:4")
    np.testing.assert_allclose(parallel(X), X + 1)


def test_a_loop_of_unknown_length() -> None:
    def shard(x: jax.Array, limit: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            count, x = carry
            return count + 1, x + lax.pmean(x, "y")

        return lax.while_loop(lambda carry: carry[0] < limit, body, (jnp.int32(0), x))[
            1
        ]

    body = jax.shard_map(
        shard,
        mesh=mesh_2x4(),
        in_specs=(P("x", "y"), P()),
        out_specs=P("x", "y"),
        check_vma=False,
    )
    check(lambda x, limit: body(x, limit) * 2, X, np.int32(3))


def test_without_a_mesh_its_mesh_is_the_plans() -> None:
    parallel = autopar.parallelize(matmul(True))
    assert str(parallel.plan(X, W).sharding.mesh) == "x:2;y:4"
    expected = jax.jit(matmul(True))(X, W)
    np.testing.assert_allclose(parallel(X, W), expected, 1e-4)


@pytest.mark.parametrize("mesh", ["x:4;y:2", "a:2;b:4", (8,)])
def test_another_mesh_is_an_error_that_says_both(mesh: object) -> None:
    parallel = autopar.parallelize(matmul(True), mesh=mesh)
    with pytest.raises(ValueError, match=r"x:2;y:4.*mesh='x:2;y:4'") as caught:
        parallel(X, W)
    assert "test_user_shard_map.py" in str(caught.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_a_set_mesh(kind: AxisType) -> None:
    expected = jax.jit(matmul(True))(X, W)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        body = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "y"),
            in_specs=(P("x", "y"), P("y", None)),
            out_specs=P("x", None),
        )
        return jnp.tanh(body(jnp.sin(x), w * 2)).sum()

    with jax.set_mesh(mesh_2x4(kind)):
        value = autopar.parallelize(step)(X, W)
    np.testing.assert_allclose(value, expected, 1e-4)


def test_axes_left_to_the_compiler_are_computed_whole_with_a_warning() -> None:
    body = jax.shard_map(
        lambda x: lax.psum(x * 2, "x"),
        mesh=mesh_2x4(),
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
    )

    def step(x: jax.Array) -> jax.Array:
        return body(x) + 1

    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    with pytest.warns(autopar.FallbackWarning, match="axes y"):
        value = parallel(X)
    np.testing.assert_allclose(value, jax.jit(step)(X), 1e-5)


def test_prints_inside_are_the_devices_own(capfd: pytest.CaptureFixture[str]) -> None:
    def shard(x: jax.Array) -> jax.Array:
        jax.debug.print("shard {}", lax.axis_index("x"))
        return x

    body = jax.shard_map(shard, mesh=mesh_2x4(), in_specs=P("x"), out_specs=P("x"))
    autopar.parallelize(lambda x: body(x))(X).block_until_ready()
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["shard 0"] * 4 + ["shard 1"] * 4


def test_a_nested_shard_map_is_refused() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return lax.psum(x, "y")

    def outer(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"}
        )(x)

    body = jax.shard_map(
        outer, mesh=mesh_2x4(), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    with pytest.raises(NotImplementedError, match=r"shard_map.*test_user_shard_map"):
        autopar.parallelize(body)(X)


def test_ordered_effects_inside_are_refused() -> None:
    def shard(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x

    body = jax.shard_map(shard, mesh=mesh_2x4(), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(NotImplementedError, match="ordered"):
        autopar.parallelize(lambda x: body(x))(X)
