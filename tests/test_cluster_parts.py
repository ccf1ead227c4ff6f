"""Clusters of several kinds of hosts: what they are, and stages that suit each kind."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.clusters.cluster_file import to_toml
from autopar.clusters.joined import cluster_around, host_parts, join_clusters
from tests.rows.fixtures import dense_stack
from tests.rows.running import run_pipeline_as_planned
from tests.solver.test_stage_dp import all_assignments, least
from tests.test_joint_search import everywhere, searcher_of
from tests.test_stage_search import two_hosts


def slower(cluster: Cluster, times: float) -> Cluster:
    """Its devices do everything in so many times the time."""
    device = cluster.device
    flops = {name: rate / times for name, rate in device.peak_flops.items()}
    bandwidth = device.memory_bandwidth / times
    device = replace(device, kind="slow", peak_flops=flops, memory_bandwidth=bandwidth)
    kernel_seconds = cluster.kernel_seconds * times
    return replace(cluster, device=device, kernel_seconds=kernel_seconds)


def fast_and_slow(times: float = 1.5) -> Cluster:
    """A host of four devices, and one whose devices take so many times as long."""
    one = replace(two_hosts(), num_hosts=1)
    return join_clusters([one, slower(one, times)])


def test_what_spans_kinds_has_what_the_least_of_them_has():
    cluster = Cluster.preset("2x4xA100+1x4xV100")
    assert (cluster.num_hosts, cluster.num_devices) == (3, 12)
    assert host_parts(cluster) == (0, 0, 1)
    a100, v100 = cluster.parts
    assert cluster_around(cluster, 4, 4) is a100
    assert cluster_around(cluster, 8, 2) is v100
    across = cluster_around(cluster, 4, 8)
    assert across.device.peak_flops == v100.device.peak_flops
    assert across.device.memory_bytes == min(
        each.device.memory_bytes for each in cluster.parts
    )
    assert across.network_link.bandwidth == v100.network_link.bandwidth


def test_a_cluster_of_several_kinds_is_kept_in_a_file(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    cluster = Cluster.preset("2x4xA100+1x4xV100")
    path.write_text(to_toml(cluster))
    assert Cluster.load(path) == cluster


def test_parts_that_cannot_be_joined_are_refused():
    with pytest.raises(ValueError, match="equally many devices"):
        Cluster.preset("2x4xA100+1x8xV100")
    with pytest.raises(ValueError, match="two or more clusters of equal hosts"):
        join_clusters([fast_and_slow(), two_hosts()])


def test_slow_devices_get_fewer_layers():
    """Run and audited: the split is as uneven as the kinds are."""
    case = dense_stack(512, 256)
    method = autopar.PipelineParallel(num_microbatches=8, schedule="eager_1f1b")
    step: Any = autopar.parallelize(case.step, cluster=fast_and_slow(), method=method)
    plan = run_pipeline_as_planned(step, *case.args).plan.stages
    ends = list(accumulate(mesh.size for mesh in plan.meshes))
    work = dict.fromkeys(("fast", "slow"), 0)
    for end, mesh, products in zip(ends, plan.meshes, plan.stage_products, strict=True):
        assert (end - mesh.size) // 4 == (end - 1) // 4  # on hosts of one kind
        work["fast" if end <= 4 else "slow"] += products
    assert work["fast"] > work["slow"] > 0


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_the_search_finds_the_split_of_exhaustive_search(times: float):
    """Over all stages on all submeshes of both kinds, each planned for its kind."""
    case = dense_stack(512, 256)
    cluster = fast_and_slow(times)
    searcher = searcher_of(case.step, case.args, cluster, num_microbatches=8)
    search = searcher.search()
    search.schedules = (("eager_1f1b", 1),)
    found = search.best(searcher.capacity_bytes)
    assert found is not None
    everywhere(search)
    problem = search.problem((8, "eager_1f1b", 1), searcher.capacity_bytes)
    two_or_more = (s for s in all_assignments(problem) if len(s) > 1)
    best = least(problem, two_or_more)
    assert best * (1 - 1e-9) <= found.assignment.seconds <= best * 1.03
    kinds = {problem.choices[each.choice].kind for each in found.assignment.stages}
    assert kinds == ({0, 1} if times < 2 else {0})  # not worth the slow link
