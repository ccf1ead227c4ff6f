"""Stages that are searched for run on the hosts of a Ray cluster."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import PipelineParallel


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def test_a_pipeline_without_a_number_of_stages_runs(ray_cluster: Cluster) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (64, 64)) * 0.2 for key in keys[1:]]
    x = jax.random.normal(keys[0], (16, 64))
    expected = jax.jit(step)(params, x)
    method = PipelineParallel(num_microbatches=2)
    parallel = autopar.parallelize(step, method=method, cluster=ray_cluster)
    got = autopar.fetch(parallel(params, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    stages = parallel.plan(params, x).stages
    assert [mesh.size for mesh in stages.meshes] == [4, 4]
    parallel.close()
