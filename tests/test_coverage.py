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
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.commands.coverage import MEANINGS, coverage
from tests.rules.strategy_oracle import random_array

X = random_array(8, 16)
POSITIVE = np.abs(X) + 0.5
BY_NAME = {entry.primitive: entry for entry in coverage()}


def test_no_primitive_is_left_to_chance() -> None:
    """If this fails for a new JAX: give it a rule, or a reason in coverage.py."""
    unknown = [e.primitive for e in BY_NAME.values() if e.treatment == "unknown"]
    assert not unknown
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert exported <= BY_NAME.keys()
    assert {e.treatment for e in BY_NAME.values()} <= MEANINGS.keys()


def test_the_doctor_prints_it() -> None:
    result = CliRunner().invoke(app, ["doctor", "--coverage"])
    assert result.exit_code == 0
    assert "dot_general" in result.output and "inlined: " in result.output


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
    step = STEPS[name]
    for function in (step, jax.jit(step)):
        found = autopar.parallelize(function, mesh="x:2;y:4")(POSITIVE)
        expected = jax.jit(step)(POSITIVE)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_tokens_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="must be an array.*[Tt]oken"):
        autopar.parallelize(lambda x: (x, lax.create_token(x)), mesh="x:8")(X)


def test_a_collective_outside_of_a_shard_map_is_jaxs_error() -> None:
    with pytest.raises(NameError, match="unbound axis name"):
        autopar.parallelize(lambda x: lax.psum(x, "x"), mesh="x:8")(X)
