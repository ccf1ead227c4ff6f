"""Decompositions, solves and transforms run on each shard's part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.sharding.spec import REPLICATED
from tests.rules.strategy_oracle import (
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)

A = np.eye(3, dtype=np.float32) * 4 + random_array(4, 2, 3, 3)
SYMMETRIC = A @ A.transpose(0, 1, 3, 2)
RIGHT = random_array(4, 2, 3, 4)


def test_factors() -> None:
    op = operator_of("cholesky", lax.linalg.cholesky, SYMMETRIC)
    assert factor_table(op) == {"b0": ((0,), (0,)), "b1": ((1,), (1,))}


def test_decompositions() -> None:
    def function(a: jax.Array) -> list[object]:
        linalg = lax.linalg
        lu, pivots, _ = linalg.lu(a)
        permutation = linalg.lu_pivots_to_permutation(pivots, 3)
        return [linalg.cholesky(a), lu, permutation, linalg.qr(a), linalg.eigh(a)]

    kinds = ("cholesky", "lu", "lu_pivots_to_permutation", "qr", "eigh")
    check_every_strategy(function, SYMMETRIC, kinds=kinds, max_strategies=8)
    check_every_strategy(lax.linalg.svd, A, kinds=("svd",), max_strategies=8)


def test_triangular_solves() -> None:
    def left(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    def right(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.linalg.triangular_solve(a, b, left_side=False, lower=True)

    op = operator_of("triangular_solve", left, A, RIGHT)
    assert factor_table(op)["n3"] == ((REPLICATED, 3), (3,))
    assert {"b0", "b1", "sum1"} <= set(factor_table(op))
    check_every_strategy(left, A, RIGHT)
    check_every_strategy(right, A, RIGHT.transpose(0, 1, 3, 2))


def test_tridiagonal_solve() -> None:
    lower, upper = random_array(4, 3), random_array(4, 3, seed=1)
    lower[:, 0] = upper[:, -1] = 0

    def function(lower: jax.Array, upper: jax.Array, b: jax.Array) -> jax.Array:
        diagonal = jnp.full_like(lower, 4.0)
        return lax.linalg.tridiagonal_solve(lower, diagonal, upper, b)

    kinds = ("tridiagonal_solve",)
    check_every_strategy(function, lower, upper, random_array(4, 3, 2), kinds=kinds)


def test_fourier_transforms() -> None:
    x = random_array(4, 2, 8)
    reached = check_every_strategy(lambda x: jnp.fft.rfft(x), x, kinds=("fft",))
    assert reached["fft"] == {"-", "b0", "b1", "sum0"}
    check_every_strategy(lambda x: jnp.fft.fft2(x), x, kinds=("fft",))
