"""Stages for hosts of a Ray cluster, given or searched for; none is started."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster, RayHosts
from autopar.clusters.ray_hosts import HostGroups, dealt_out
from autopar.methods.methods import PipelineParallel
from tests.marks import slow
from tests.rows.fixtures import tanh_chain

ELSEWHERE = RayHosts("10.0.0.1:6379", "cpu", 600.0)


def hosts(number: int, inside: int) -> Cluster:
    preset = Cluster.preset(f"{number}x{inside}xCPU")
    return replace(preset, ray_hosts=ELSEWHERE)


def arguments(num_layers: int = 6) -> Any:
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    params = [jax.random.normal(key, (128, 128)) * 0.1 for key in keys[1:]]
    return params, jax.random.normal(keys[0], (48, 128))


@pytest.mark.parametrize(
    ("sizes", "num_hosts", "places"),
    [
        ([4, 4], (1, 1), [(0, 0), (1, 0)]),
        ([4, 8], (1, 2), [(0, 0), (1, 0)]),
        ([2, 2, 8, 1, 3], (1, 2, 1), [(0, 0), (0, 2), (1, 0), (2, 0), (2, 1)]),
        ([12], (3,), [(0, 0)]),
        ([1, 2], (1,), [(0, 0), (0, 1)]),
    ],
)
def test_submeshes_share_hosts_or_have_whole_ones(
    sizes: list[int], num_hosts: tuple[int, ...], places: list[tuple[int, int]]
) -> None:
    assert HostGroups.of(sizes, 4) == HostGroups(num_hosts, tuple(places))


@pytest.mark.parametrize("sizes", [[6, 6], [2, 4, 2], [3, 3], [1, 8, 3]])
def test_a_submesh_on_parts_of_two_hosts_is_refused(sizes: list[int]) -> None:
    with pytest.raises(NotImplementedError, match=r"part of one host, or .*such as"):
        HostGroups.of(sizes, 4)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((2, 3, 4), [4, 8]),
        ((4, 2, 4), [2, 2, 2, 2]),
        ((3, 2, 4), [4, 2, 2]),
        ((5, 2, 8), [4, 4, 4, 2, 2]),
        ((2, 1, 7), [4, 3]),
    ],
)
def test_what_is_dealt_out_is_all_there_is_and_may_be(
    given: tuple[int, int, int], sizes: list[int]
) -> None:
    number, num_hosts, inside = given
    assert dealt_out(*given) == sizes and len(sizes) == number
    assert sum(HostGroups.of(sizes, inside).num_hosts) == num_hosts


@pytest.mark.parametrize(
    ("number", "inside"),
    [*(slow(n, 4) for n in (1, 2)), (3, 2)],
)
def test_a_search_finds_what_it_finds_for_one_process(number: int, inside: int) -> None:
    clusters = hosts(number, inside), Cluster.preset(f"{number}x{inside}xCPU")
    method = PipelineParallel(num_microbatches=4)
    there, here = (
        parallelize(tanh_chain, method=method, cluster=cluster).plan(*arguments(4))
        for cluster in clusters
    )
    assert there.stages.meshes == here.stages.meshes
    assert there.predicted == here.predicted
    sizes = [mesh.size for mesh in there.stages.meshes]
    assert len(sizes) > 1 and sum(HostGroups.of(sizes, inside).num_hosts) <= number


@pytest.mark.parametrize("mesh", [None, "x:3"])
def test_hosts_that_cannot_be_dealt_out_are_refused(mesh: str | None) -> None:
    cluster = hosts(1, 1) if mesh is None else hosts(2, 2)
    step = parallelize(
        tanh_chain, method=PipelineParallel(), cluster=cluster, mesh=mesh
    )
    with pytest.raises(ValueError, match="A stage has fewer devices than there are"):
        step.plan(*arguments())


def test_given_products_on_uneven_devices_are_refused() -> None:
    method = PipelineParallel(num_stages=5, stage_products=(2, 1, 1, 1, 1))
    step = parallelize(tanh_chain, method=method, cluster=hosts(3, 4))
    with pytest.raises(ValueError, match="say how with `stage_meshes`"):
        step.plan(*arguments())


def test_devices_that_stages_do_not_divide_are_searched_for_as_hosts_allow() -> None:
    step = parallelize(
        tanh_chain, method=PipelineParallel(num_stages=5), cluster=hosts(3, 4)
    )
    stages = step.plan(*arguments()).stages
    sizes = [mesh.size for mesh in stages.meshes]
    assert len(sizes) == 5 and len(HostGroups.of(sizes, 4).places) == 5
