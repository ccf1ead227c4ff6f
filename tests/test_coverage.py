"""Every primitive that jax exports has a known fate, and gives the values of jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

import autopar
from autopar.costs.user_shard_map import COLLECTIVES
from autopar.graph.build_graph import STRUCTURED
from autopar.jax_compat import CALLS
from autopar.rules.base import registered_rules
from tests.rules.strategy_oracle import random_array

X = random_array(8, 16)
POSITIVE = np.abs(X) + 0.5
KNOWN = {
    "custom_linear_solve": "inlined",
    "axis_index": "runs as written in a shard_map of the user's",
    "pure_callback": "whole: its result is the same wherever it is called",
    "ffi_call": "whole: a rule by target name may split it",
    "pallas_call": "whole: a rule by kernel name may split it",
    "platform_index": "whole: a scalar",
    "after_all": "refused: tokens order side effects, which devices do not share",
    "create_token": "refused: tokens order side effects, which devices do not share",
    "custom_lin": "refused: exists only while jax.linearize runs",
    "get": "refused: reads a mutable Ref",
    "ragged_all_to_all": "refused: its traffic depends on values",
    "swap": "refused: writes a mutable Ref",
}


def test_no_primitive_is_left_to_chance() -> None:
    """If this fails for a new JAX: give it a rule, or a reason in KNOWN."""
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    known = {*registered_rules(), *STRUCTURED, *CALLS, *COLLECTIVES, *KNOWN}
    assert not exported - known


def solve(x: jax.Array) -> jax.Array:
    def matvec(v: jax.Array) -> jax.Array:
        return 3 * v + jnp.roll(v, 1)

    matrix = jax.vmap(matvec, in_axes=1, out_axes=1)(jnp.eye(16))
    return lax.custom_linear_solve(
        matvec,
        x[0],
        lambda _, b: jnp.linalg.solve(matrix, b),
        lambda _, b: jnp.linalg.solve(matrix.T, b),
    )


@jax.custom_batching.custom_vmap
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


@doubled.def_vmap
def _(axis_size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return x * 2, batched[0]


def generated(x: jax.Array) -> Any:
    key = jnp.array([1, 2, 3, 4], jnp.uint32)
    bits = lax.rng_bit_generator(key, x.shape, jnp.uint32)[1]
    return bits, x


STEPS: dict[str, Callable[[jax.Array], Any]] = {
    "custom_linear_solve": solve,
    "custom_vmap_call": lambda x: doubled(x) + 1,
    "composite": lambda x: lax.composite(lambda x: jnp.sin(x), "my.sin")(x) * 2,
    "platform_index": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x),
    "rng_bit_generator": generated,
    "top_k": lambda x: lax.top_k(x, 3),
    "approx_top_k": lambda x: lax.approx_max_k(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "clamp": lambda x: lax.clamp(0.7, x, 1.0),
}


@pytest.mark.filterwarnings("ignore::autopar.FallbackWarning")
@pytest.mark.parametrize("name", STEPS)
def test_values_are_those_of_jax(name: str) -> None:
    """Also inside of a call."""
    step = STEPS[name]
    both = autopar.parallelize(lambda x: (step(x), jax.jit(step)(x)), mesh="x:2;y:4")
    expected = jax.jit(step)(POSITIVE)
    for found in both(POSITIVE):
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_tokens_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="must be an array.*[Tt]oken"):
        autopar.parallelize(lambda x: (x, lax.create_token(x)), mesh="x:8")(X)


def test_a_collective_outside_of_a_shard_map_is_jaxs_error() -> None:
    with pytest.raises(NameError, match="unbound axis name"):
        autopar.parallelize(lambda x: lax.psum(x, "x"), mesh="x:8")(X)
