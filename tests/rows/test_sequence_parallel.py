"""Rows of sequence and context parallelism: F8, attention with its sequence split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import ParallelFunction
from tests.rows.fixtures import random
from tests.rows.running import run_as_planned, traffic

SPLIT = P(None, "n")
BSH_BYTES = 2 * 64 * 8 * 16 * 4


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[batch, sequence, heads, dim] each."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return autopar.pin(attention(q, k, v), SPLIT)


def with_gradients(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
    y, backward = jax.vjp(attention, q, k, v)
    return [autopar.pin(each, SPLIT) for each in (y, *backward(dy))]


def operands(number: int, heads: int = 8) -> list[jax.Array]:
    return [random(seed, 2, 64, heads, 16) for seed in range(number)]


def split(function: Any) -> ParallelFunction:
    mesh = Mesh(np.array(jax.devices()[:4]), ("n",))
    return autopar.parallelize(function, mesh=mesh, pins={".": SPLIT}, batch_argnums=())


@pytest.mark.parametrize(
    ("function", "number", "times"), [(forward, 3, 4), (with_gradients, 4, 8)]
)
def test_col_5_heads_are_exchanged_for_the_sequence(
    function: Any, number: int, times: int
) -> None:
    """Ulysses, which the solver finds: q, k, v and the result, and their gradients."""
    plan = run_as_planned(split(function), *operands(number)).plan
    assert BSH_BYTES // 4 == 16_384
    assert traffic(plan) == {("all_to_all", "n"): [16_384] * times}


def test_col_5_and_meg_7_heads_that_no_device_count_divides_gather_keys() -> None:
    """Six heads on four devices: queries stay, keys and values come to them, and their
    gradients are added where they lie."""
    plan = run_as_planned(split(with_gradients), *operands(4, heads=6)).plan
    num_bytes = BSH_BYTES * 6 // 8
    assert traffic(plan) == {
        ("all_gather", "n"): [num_bytes] * 2,
        ("reduce_scatter", "n"): [num_bytes // 4] * 2,
    }
