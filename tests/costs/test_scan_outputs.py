"""What loops stack is priced: large gradients are scattered before they are stacked."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.costs.scan_outputs import stack_seconds_per_byte
from autopar.steps.lowered_step import Lowered
from benchmarks.plan_price import plan_seconds

NUM_LAYERS, DEVICES = 4, 8


def lowered(width: int) -> Lowered:
    """A scan over layers of `width` x `width`, with momentum, on eight devices."""

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            last, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            return jnp.mean(last**2)

        m = 0.9 * m + jax.grad(loss)(w)
        return w - 0.1 * m, m

    w = jax.ShapeDtypeStruct((NUM_LAYERS, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((64 * DEVICES, width), jnp.float32)
    found = autopar.parallelize(step, mesh="x:8").lower(w, w, x)
    return cast("Lowered", found)


@pytest.mark.parametrize(("width", "count"), [(16, 1), (512, NUM_LAYERS)])
def test_large_gradients_are_scattered_in_the_loop(width: int, count: int) -> None:
    """Small ones after it: then the time to start a collective decides."""
    reducing = ("reduce_scatter", "all_reduce")
    sent = lowered(width).plan.sharding.collectives
    assert {each.count for each in sent if each.kind in reducing} == {count}


def test_the_loop_is_charged_for_what_a_device_stacks() -> None:
    found, cluster = lowered(512), Cluster.preset("1x8xCPU")
    plan = found.plan.sharding
    stacks = [op for op in plan.operators if op.kind == "scan" and op.seconds]
    kept = 64 * 512 * 4  # what the product reads, and twice for the tanh
    gradients = 512 * 512 * 4 // DEVICES
    per_byte = stack_seconds_per_byte(cluster)
    assert sorted(op.seconds / per_byte / NUM_LAYERS for op in stacks) == (
        pytest.approx([gradients, 3 * kept], rel=1e-6)
    )
    assert plan_seconds(found.graph, plan, cluster) == (
        pytest.approx(plan.predicted.step_seconds)
    )
