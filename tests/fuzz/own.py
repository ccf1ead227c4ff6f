"""What users bring: a primitive and kernels of their own, some with a rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AxisType, Mesh, PartitionSpec

import autopar
from autopar.jax_compat import mlir

# Meshes that a shard_map in a program may be on, by the name it has in the text.
MESHES = {"ROWS_AND_COLUMNS": (2, 4)}
ROWS_AND_COLUMNS = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
# What the text of a program may name of these.
FUNCTIONS = "batched called doubled exchanged halved in_rows partitioned product_p "
FUNCTIONS = (FUNCTIONS + "solved laid_like").split()
_BOTH = PartitionSpec("x", "y")


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x) @ w


product_p = Primitive("fuzz_product")
product_p.def_impl(_product)
product_p.def_abstract_eval(
    lambda x, w: jax.typeof(jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-1]), x.dtype))
)
mlir.register_lowering(product_p, mlir.lower_fun(_product, multiple_results=False))
autopar.register_rule(product_p, "b m k, b k n -> b m n")


def _double_kernel(x_ref: Any, result_ref: Any) -> None:
    result_ref[...] = x_ref[...] * 2


def doubled(x: jax.Array) -> jax.Array:
    """A kernel with a rule."""
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double_kernel, kind, interpret=True, name="fuzz_double")(x)


def halved(x: jax.Array) -> jax.Array:
    """A kernel without one."""

    def halve_kernel(x_ref: Any, result_ref: Any) -> None:
        result_ref[...] = x_ref[...] * 0.5

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(halve_kernel, kind, interpret=True)(x)


autopar.register_rule("pallas_call:fuzz_double", "i j -> i j", local=doubled)


@custom_partitioning
def partitioned(x: jax.Array) -> jax.Array:
    """A function that says to GSPMD how it splits."""
    return jnp.tanh(x) * 3


partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: None,
    sharding_rule="... -> ...",
)


@jax.custom_batching.custom_vmap
def batched(x: jax.Array) -> jax.Array:
    """A function with a vmap of its own."""
    return x * 2


@batched.def_vmap
def _(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return x + x, in_batched[0]


def called(x: jax.Array) -> jax.Array:
    """A pure function of numpy, on the host."""
    return jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="sequential")


def solved(x: jax.Array) -> jax.Array:
    """`a` in `2.5 a + roll(a) = x` along the last dim."""

    def multiply(a: jax.Array) -> jax.Array:
        return 2.5 * a + jnp.roll(a, 1, -1)

    def solve(_: Any, b: jax.Array) -> jax.Array:
        matrix = jax.vmap(multiply)(jnp.eye(x.shape[-1], dtype=x.dtype))
        return b @ jnp.linalg.inv(matrix)

    return lax.custom_linear_solve(multiply, x, solve, solve)


def laid_like(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` where `y` lies, of one shape."""
    return autopar.relayout_like(x, y)


def in_rows(x: jax.Array, mesh: Mesh) -> jax.Array:
    """[n] sums of `x` [n, m] by a shard_map over both axes."""

    def body(a: jax.Array) -> jax.Array:
        return lax.psum(jnp.sum(a, 1), "y")

    rows = PartitionSpec("x")
    return jax.shard_map(body, mesh=mesh, in_specs=_BOTH, out_specs=rows)(x)


def exchanged(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Most collectives: `x` [n, m], n and m multiples of 8."""

    def body(a: jax.Array) -> jax.Array:
        turned = lax.ppermute(a, "y", [(i, (i + 1) % 4) for i in range(4)])
        rows = lax.all_gather(turned, "x", axis=0, tiled=True)
        parts = lax.psum_scatter(rows, "x", scatter_dimension=0, tiled=True)
        swapped = lax.all_to_all(parts, "y", 0, 1, tiled=True)
        back = lax.all_to_all(swapped, "y", 1, 0, tiled=True)
        return back + lax.pmax(a, "y") * lax.axis_index("x").astype(a.dtype)

    return jax.shard_map(body, mesh=mesh, in_specs=_BOTH, out_specs=_BOTH)(x)
