"""Device counts that the dims of a step do not divide."""

from __future__ import annotations

import math
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.marks import slow


def step(params: jax.Array, x: jax.Array) -> jax.Array:
    def loss(params: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    return params - 0.1 * jax.grad(loss)(params)


def shapes(examples: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    params = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    return params, jax.ShapeDtypeStruct((examples, 512), jnp.float32)


def planned(num_devices: int, examples: int) -> autopar.Plan:
    cluster = autopar.Cluster.preset(f"1x{num_devices}xH100")
    return autopar.parallelize(step, cluster=cluster).plan(*shapes(examples))


@pytest.mark.parametrize(("devices", "fewer", "more"), [(7, 4, 1029), (6, 4, 1026)])
def test_a_device_count_that_divides_nothing_is_told(
    devices: int, fewer: int, more: int
) -> None:
    remedy = f"use {fewer} devices, or {more} examples in place of 1024"
    with pytest.warns(autopar.FallbackWarning, match=remedy) as caught:
        plan = planned(devices, 1024)
    done = re.search(r"does (\d+)% of the heavy work of step", str(caught[0].message))
    assert done is not None
    parts = math.prod(s for s in plan.sharding.mesh.axis_sizes if 1024 % s == 0)
    assert int(done[1]) == 100 // parts


@pytest.mark.parametrize(("devices", "examples"), [(7, 1029), (8, 1024), (4, 1024)])
def test_one_that_divides_the_step_is_not(devices: int, examples: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(devices, examples).predicted.split_flops_fraction == 1


@pytest.mark.parametrize("name", ["1x12xA100", slow("2x6xA100")])
def test_a_budget_that_the_cheapest_plan_keeps_to_leaves_it(name: str) -> None:
    """The first shapes of 12 devices divide the parameters by 4, or not at all."""

    def planned(**options: object) -> autopar.Plan:
        cluster = autopar.Cluster.preset(name)
        return autopar.parallelize(step, cluster=cluster, **options).plan(*args)

    params = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    args = params, jax.ShapeDtypeStruct((1536, 4096), jnp.float32)
    free = planned().predicted
    for more in (1.0, 1.1):
        within = planned(memory_budget=int(more * free.peak_bytes)).predicted
        assert within.step_seconds <= 1.005 * free.step_seconds
