"""`autopar.Auto` looks for pipelines where steps run on the hosts of a Ray cluster."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

import autopar
from autopar.clusters.cluster import Cluster
from autopar.plans.staged_plan import StagedPlan
from tests.rows.fixtures import dense_stack


def with_link(cluster: Cluster, times: int) -> Cluster:
    """Its hosts are linked so many times more slowly than the devices of one."""
    link = cluster.host_link
    return replace(
        cluster, network_link=replace(link, bandwidth=link.bandwidth / times)
    )


def test_hosts_become_stages_where_the_link_between_them_is_slow(
    ray_cluster: Cluster,
) -> None:
    """One program where the link is as fast; and values are those of one device."""
    case = dense_stack(256, 128, num_layers=2)
    even = autopar.parallelize(case.step, cluster=with_link(ray_cluster, 1))
    assert not isinstance(even.plan(*case.args).decision, StagedPlan)
    step: Any = autopar.parallelize(case.step, cluster=with_link(ray_cluster, 100))
    assert step.plan(*case.args).stages.num_stages > 1
    expected = jax.jit(case.step)(*case.args)
    got = autopar.fetch(step(*case.args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    step.close()
