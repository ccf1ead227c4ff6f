"""Stages that are searched for run on the hosts of a Ray cluster."""

import jax
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import PipelineParallel
from tests.rows.fixtures import tanh_chain


def test_a_pipeline_without_a_number_of_stages_runs(ray_cluster: Cluster) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (64, 64)) * 0.2 for key in keys[1:]]
    x = jax.random.normal(keys[0], (16, 64))
    expected = jax.jit(tanh_chain)(params, x)
    method = PipelineParallel(num_microbatches=2)
    parallel = autopar.parallelize(tanh_chain, method=method, cluster=ray_cluster)
    got = autopar.fetch(parallel(params, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    here = autopar.parallelize(
        tanh_chain, method=method, cluster=Cluster.preset("2x4xCPU")
    )
    found, expected = (step.plan(params, x).stages for step in (parallel, here))
    assert found.meshes == expected.meshes, "a search knows no difference"
    assert [mesh.size for mesh in found.meshes] != [4, 4]


@pytest.mark.slow
def test_weight_tasks_run_on_their_hosts(ray_cluster: Cluster) -> None:
    """Zero bubble, which a search may choose, has the values of one device."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (64, 64)) * 0.2 for key in keys[1:]]
    x = jax.random.normal(keys[0], (16, 64))
    expected = jax.jit(tanh_chain)(params, x)
    method = PipelineParallel(2, 4, "zb_h2")
    parallel = autopar.parallelize(tanh_chain, method=method, cluster=ray_cluster)
    programs = parallel.plan(params, x).stages.programs
    assert [each.stage for each in programs if each.kind == "weight"] == [1]
    got = autopar.fetch(parallel(params, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
