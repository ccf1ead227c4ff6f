"""State and residuals in the memory of hosts of a Ray cluster, as in one process."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import Method, PipelineParallel, ShardParallel
from tests.marks import slow

BATCH, WIDTH, NUM_LAYERS = 16, 16, 2
OFFLOADING = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
TWO_STAGES = PipelineParallel(num_stages=2, num_microbatches=2)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def init(key: jax.Array) -> Any:
    """A table that the first and the last layer read, and layers between them."""
    keys = jax.random.split(key, NUM_LAYERS + 1)
    table, *layers = (jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys)
    params = {"table": table, "layers": layers}
    return params, OPTIMIZER.init(params)


def train_step(state: Any, x: jax.Array, policy: Any = None) -> Any:
    def layer(hidden: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.tanh(hidden @ w), "hidden"))

    wrapped = jax.checkpoint(layer, policy=policy) if policy else layer

    def loss_fn(params: Any) -> jax.Array:
        hidden = x @ params["table"]
        for w in params["layers"]:
            hidden = wrapped(hidden, w)
        return jnp.mean((hidden @ params["table"].T - x) ** 2)

    params, memory = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, memory = OPTIMIZER.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), {"loss": loss}


def batches(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.standard_normal((BATCH, WIDTH), np.float32)


def places(tree: Any) -> list[bool]:
    """Which matrices lie in the memory of hosts."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
    return ["pinned_host" in str(leaf.sharding) for leaf in leaves]


def assert_close(got: Any, expected: Any) -> None:
    leaves = jax.tree.leaves(autopar.fetch(got)), jax.tree.leaves(expected)
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "mesh", "offload"),
    [
        (ShardParallel(), "data:2;model:4", "optimizer_state"),
        slow(ShardParallel(), "data:2;model:4", "state"),
        slow(TWO_STAGES, "x:4", "optimizer_state"),
        (TWO_STAGES, "x:4", "state"),
    ],
    ids=["whole-optimizer", "whole-state", "stages-optimizer", "stages-state"],
)
def test_state_stays_there_and_the_step_is_the_same(
    ray_cluster: Cluster, method: Method, mesh: str, offload: Any, tmp_path: Path
):
    step = autopar.parallelize(
        train_step, method=method, cluster=ray_cluster, mesh=mesh, offload=offload
    )
    key = jax.random.key(0)
    state = step.init(init, key, batch=batches(0))
    expected = init(key)
    for number in range(2):
        assert places(state[0]) == [offload == "state"] * (NUM_LAYERS + 1)
        assert all(places(state[1]))
        state, metrics = step(state, batches(number))
        expected, wanted = jax.jit(train_step)(expected, batches(number))
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
    assert_close(state, expected)
    autopar.save(tmp_path / "state", state)
    like = step.abstract_state(init, key, batch=batches(0))
    restored = autopar.restore(tmp_path / "state", like)
    state, _ = step(restored, batches(2))
    expected, _ = jax.jit(train_step)(expected, batches(2))
    assert all(places(state[1]))
    assert_close(state, expected)


def test_residuals_go_where_a_policy_says(ray_cluster: Cluster):
    def offloading(state: Any, x: jax.Array) -> Any:
        return train_step(state, x, OFFLOADING)

    step = autopar.parallelize(offloading, method=TWO_STAGES, cluster=ray_cluster)
    state, expected = init(jax.random.key(0)), init(jax.random.key(0))
    lowered = step.lower(state, batches(0))
    program = lowered.step.pipeline.program  # pyright: ignore
    kinds = {
        program.shardings[name, stage].memory_kind
        for (name, stage) in program.shardings
        if program.slots[name].kind == "activation"
    }
    assert "pinned_host" in kinds
    for number in range(2):
        state, metrics = step(state, batches(number))
        expected, wanted = jax.jit(train_step)(expected, batches(number))
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
    assert_close(state, expected)
