"""What the fuzzer found, as the few lines that were left of each program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.sharding.mesh import MeshShape
from tests.fuzz.oracle import check_function
from tests.fuzz.plans import Case

MESHES = [
    MeshShape(("x", "y"), (1, 4)),
    MeshShape(("x", "y"), (2, 4)),
    MeshShape(("x",), (8,)),
]


def check(
    function: Callable[..., Any],
    *args: Any,
    seeds: int = 4,
    meshes: Sequence[MeshShape] = MESHES,
) -> None:
    """Right under random plans on several meshes."""
    for mesh in meshes:
        for seed in range(seeds):
            check_function(function, args, Case(mesh, "uniform", seed))


def test_tensors_without_elements_are_resharded() -> None:
    """`all_gather` and `reduce_scatter` of an empty dim do not lower."""

    def function(x: jax.Array) -> Any:
        empty = x[:, 4:]
        return empty * 2, jnp.concatenate([jnp.sin(empty), x], 1), empty.sum(1)

    check(function, np.ones((4, 4), np.float32))


def test_a_while_loop_is_not_given_what_it_does_not_read() -> None:
    """JAX keeps an unread constant of its body, the lowered loop does not."""

    def function(x: jax.Array, y: jax.Array) -> Any:
        def step(carry: jax.Array, flag: jax.Array) -> Any:
            state = (jnp.int32(0), (carry, flag))
            _, (carry, _) = lax.while_loop(
                lambda c: c[0] < jnp.max(y % 4).astype(jnp.int32),
                lambda c: (c[0] + 1, (jnp.tanh(c[1][0]), c[1][1])),
                state,
            )
            return carry, ()

        return lax.scan(step, x, jnp.cumsum(jnp.sin(x)) > 0)[0]

    check(function, np.ones(8, np.float32), np.arange(8, dtype=np.uint32))


@pytest.mark.slow
def test_solves_in_a_loop_read_no_matrix_that_is_dead() -> None:
    """Only the solution of `custom_linear_solve` is computed, and the scan reads less.

    A plan that keeps the matrix would reshard what the lowered program does not.
    """

    def function(x: jax.Array) -> Any:
        matrix = jnp.eye(8) + jnp.tanh(x) @ jnp.tanh(x).T / 8

        def step(carry: jax.Array, row: jax.Array) -> Any:
            return jnp.linalg.solve(matrix, carry + row), ()

        return lax.scan(step, x[0], x)[0].sum()

    check(jax.grad(function), np.ones((8, 8), np.float32))


def test_nan_passes_through_a_split_maximum() -> None:
    """XLA's all-reduce with max or min gives the other number, or its own start."""
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x[2, 3] = x[5] = np.nan
    x[6, 1], x[7, 1] = np.inf, -np.inf
    for dtype in (jnp.float32, jnp.bfloat16):
        y = jnp.asarray(x, dtype)
        check(lambda x: (x.max(), x.min(0), x.max(1), (-x).max(0)), y)


def test_scatters_of_complex_and_of_bool() -> None:
    """There is no least complex number to put where an update is another shard's."""

    def function(x: jax.Array, flags: jax.Array, indices: jax.Array) -> Any:
        return (
            x.at[indices].max(0.5, mode="clip"),
            x.at[indices].add(0.5j),
            flags.at[indices].max(True),
            flags.at[indices].min(False),
        )

    x = np.arange(8, dtype=np.complex64)
    check(function, x, np.arange(8) % 3 == 0, np.array([1, 5], np.uint32))


def test_a_reshape_that_transposes_first() -> None:
    """The gradient of a grouped convolution reshapes its kernel by `dimensions`."""

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=2)
        return jnp.sin(y).mean()

    x = np.random.default_rng(0).normal(size=(8, 4, 4, 4)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(8, 2, 3, 3)).astype(np.float32)
    check(jax.grad(convolved), x, kernel, seeds=2)
    check(lambda x: lax.reshape(x, (32, 16), (1, 0, 3, 2)), x, seeds=2)


def test_a_transform_between_collectives() -> None:
    """XLA's CPU transform fails on what an all-to-all beside it lays out anew."""
    x = np.random.default_rng(0).normal(size=(4, 16, 4, 4)).astype(np.float32)
    check(lambda x: jnp.fft.fft(x, axis=-1).real / 4, x)


def test_an_exchange_of_what_was_joined() -> None:
    """XLA's CPU compiler fails on operands of an all-to-all with different layouts."""
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) > 0
    mesh = MeshShape(("x",), (2,))
    check(lambda x: jnp.concatenate([x.T, x], 1), x, seeds=6, meshes=[mesh])


def test_a_sum_over_devices_of_a_complex_constant() -> None:
    """XLA's CPU compiler ends the process where it can tell that it is one."""
    mesh = MeshShape(("x",), (2,))

    def function(x: jax.Array) -> Any:
        return x, jnp.full((4,), 1j, jnp.complex64), jnp.zeros((4, 2), jnp.complex64)

    check(function, np.ones(4, np.float32), seeds=8, meshes=[mesh])


def test_what_a_custom_derivative_alone_would_read() -> None:
    """An operand that its function ignores is not read inside a branch either."""

    @jax.custom_vjp
    def picked(x: jax.Array, n: int) -> jax.Array:
        x[np.array([0, 2, 1, -1, 1, 0, 2, 1])]
        return jnp.tanh(x)

    picked.defvjp(lambda x, n: (picked(x, n), x), lambda x, g: (g * jnp.cos(x), None))

    def function(x: jax.Array, index: jax.Array) -> Any:
        branches = [lambda x: picked(x, 2), jnp.sin]
        return lax.switch(index, branches, jnp.cos(x))

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    mesh = MeshShape(("x",), (2,))
    check(function, x, np.int32(0), seeds=8, meshes=[mesh])


def test_the_high_half_of_products() -> None:
    """XLA has it on one device only."""
    x = np.random.default_rng(0).integers(-(2**31), 2**31, (8, 8), np.int32)
    check(lambda x: lax.mulhi(x, x + 1), x, seeds=2)


def test_a_shard_of_a_slice_that_starts_out_of_range() -> None:
    """XLA makes one slice of two, and clamps the sum of their starts."""

    def function(x: jax.Array, start: jax.Array) -> Any:
        taken = lax.dynamic_slice(jnp.sin(x), (start, start), (4, 4))
        put = lax.dynamic_update_slice(x * 2, taken, (-start, start))
        return jnp.cos(taken), jnp.cos(put)

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    for start in (7, -3):
        check(function, x, np.int32(start), seeds=3)


def test_scatters_of_unsigned_integers() -> None:
    """The greatest one is no int32."""
    x = np.arange(16, dtype=np.uint32)
    check(lambda x: x.at[x - 2].min(2, mode="drop"), x)


def test_bits_of_split_keys_where_integers_are_wide() -> None:
    """The offsets of a shard are int32, and a Python zero beside them is an int64."""

    def function(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return jax.vmap(lambda k: jax.random.bits(k, (2, 8)))(keys)

    with jax.enable_x64(True):
        for implementation in ("threefry2x32", "rbg"):
            check(function, jax.random.key(0, impl=implementation), seeds=2)


def test_infinity_may_become_nan_where_a_pending_sum_is_multiplied() -> None:
    """JAX's gradient of a scatter out of range divides by zero, and multiplies it."""

    def function(x: jax.Array) -> Any:
        y = x.at[np.array([6, 0, 1])].max(jnp.mean(x), mode="clip")
        return jnp.mean(jnp.tanh(y))

    check(jax.grad(function), np.arange(20, dtype="f").reshape(5, 4))


def test_a_value_laid_like_another_reads_that_as_it_was_made() -> None:
    """Its program does not read the other, so nothing may be planned to move it."""

    def function(x: jax.Array, y: jax.Array) -> Any:
        like = autopar.relayout_like(x, y * 2)
        return autopar.relayout_like(jnp.sin(y), like), x @ y

    x = np.ones((8, 8), np.float32)
    check(function, x, np.sin(np.arange(64.0, dtype=np.float32)).reshape(8, 8))


def test_a_barrier_in_a_loop_over_little() -> None:
    """XLA's CPU compiler makes one kernel of the loop, and dies of its barriers."""

    def function(x: jax.Array) -> Any:
        def step(carry: jax.Array, pair: Any) -> Any:
            product = jax.checkpoint(lambda a, b: jnp.sin(a) * b)
            return carry, product(*pair)

        return lax.scan(step, jnp.float32(0), (x, x + 1))[1]

    x = np.arange(4, dtype=np.float32)  # communicating loops are no kernels
    check_function(function, (x,), Case(MeshShape(("x",), (8,)), "solver", 0))


def test_a_loop_that_only_exchanges_its_carries() -> None:
    """Its body has no operator, and so no kernel that a carry could die at."""

    def function(x: jax.Array) -> Any:
        return lax.fori_loop(0, 3, lambda _, pair: (pair[1], pair[0]), (x, x + 1))

    check(function, np.ones((8, 8), np.float32), seeds=2)
