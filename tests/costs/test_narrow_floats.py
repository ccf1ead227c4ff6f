"""CPUs compute bfloat16, and products of float16, in float32: what that takes."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.costs.memory import memory_profile
from autopar.plans.plan_file import from_json, to_json

NARROW = jnp.bfloat16
X = jax.ShapeDtypeStruct((64, 256), NARROW)
W = jax.ShapeDtypeStruct((256, 256), NARROW)
STACK = jax.ShapeDtypeStruct((4, 256, 256), NARROW)


def mesh_of(num_devices: int) -> Mesh:
    devices, types = jax.devices()[:num_devices], (AxisType.Auto,)
    return jax.make_mesh((num_devices,), ("x",), devices=devices, axis_types=types)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


def asked_for_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.float32)


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.square(product(x, w)).sum().astype(jnp.float32))(w)


def looped(x: jax.Array, stack: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


@pytest.mark.parametrize(
    ("fun", "weights", "num_devices"),
    [
        (product, W, 1),
        (asked_for_float32, W, 1),
        (summed, W, 1),
        (looped, STACK, 1),
        (summed, W, 8),
    ],
)
def test_predicted_is_what_is_compiled(
    fun: Callable[..., jax.Array], weights: jax.ShapeDtypeStruct, num_devices: int
) -> None:
    step = autopar.parallelize(fun, mesh=mesh_of(num_devices))
    compiled = step.lower(X, weights).compile()
    seen = MemoryUse.of(compiled.compiled).device_bytes
    assert compiled.plan.predicted.peak_bytes == pytest.approx(seen, rel=0.03)


def test_of_float16_only_products_are_computed_so() -> None:
    x, w = (jax.ShapeDtypeStruct(each.shape, jnp.float16) for each in (X, W))
    for num_devices, fun in ((1, product), (1, summed), (8, summed)):
        step = autopar.parallelize(fun, mesh=mesh_of(num_devices))
        compiled = step.lower(x, w).compile()
        seen = MemoryUse.of(compiled.compiled).device_bytes
        assert compiled.plan.predicted.peak_bytes == pytest.approx(seen, rel=0.03)


def test_only_cpus_do_so() -> None:
    lowered = autopar.parallelize(product, mesh=mesh_of(1)).lower(X, W)
    graph, plan = lowered.graph, lowered.plan.sharding
    assert plan.device_kind == "CPU"
    elsewhere = memory_profile(graph, replace(plan, device_kind="H100"))
    here = memory_profile(graph, plan)
    assert here.temp_bytes > 2 * elsewhere.temp_bytes
    assert from_json(to_json(plan), "plan.json") == plan
