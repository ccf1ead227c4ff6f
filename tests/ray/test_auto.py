"""`autopar.Auto` looks for pipelines where steps run on the hosts of a Ray cluster."""

from dataclasses import replace

import jax

import autopar
from autopar.clusters.cluster import Cluster
from autopar.plans.staged_plan import StagedPlan
from tests.ray.trainings import assert_close
from tests.rows.fixtures import tanh_chain


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
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (64, 64)) * 0.2 for key in keys[1:]]
    x = jax.random.normal(keys[0], (16, 64))
    even = autopar.parallelize(tanh_chain, cluster=with_link(ray_cluster, 1))
    assert not isinstance(even.plan(params, x).decision, StagedPlan)
    slow = autopar.parallelize(tanh_chain, cluster=with_link(ray_cluster, 100))
    plan = slow.plan(params, x)
    assert plan.stages.num_stages > 1
    step = autopar.parallelize(tanh_chain, plan=plan, cluster=ray_cluster)
    assert_close(step(params, x), jax.jit(tanh_chain)(params, x))
