"""A method and a mesh for some hosts, on other ones."""

from typing import Any

import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.methods.fewer_hosts import fit_hosts
from autopar.methods.methods import check_method
from autopar.sharding.mesh import parse_mesh

PIPELINE = autopar.PipelineParallel(num_stages=4, num_microbatches=6)


def hosts(number: int) -> Cluster:
    return Cluster.preset(f"{number}x4xH100")


def fitted(method: Any, mesh: Any, old: int, new: int) -> tuple[Any, Any, int]:
    found, shape, used = fit_hosts(method, mesh, hosts(old), hosts(new))
    return check_method(found), shape, used.num_hosts


def test_equal_hosts_change_nothing():
    assert fitted(PIPELINE, "x:4", 4, 4) == (PIPELINE, "x:4", 4)


@pytest.mark.parametrize(
    ("mesh", "new"),
    [
        ("data:2;model:4", "data:1;model:4"),
        ("data:-1;model:2", "data:2;model:2"),
        ("x:8", "x:4"),
    ],
)
def test_the_first_axis_is_the_one_over_hosts(mesh: str, new: str):
    _, found, used = fitted(autopar.ShardParallel(), mesh, 2, 1)
    assert (found, used) == (parse_mesh(new), 1)


def test_a_mesh_that_cannot_shrink_becomes_one_axis():
    assert fitted(autopar.Auto(), "data:2;model:6", 3, 2)[1] is None


def test_three_d_has_fewer_groups():
    method = autopar.ThreeD(data=4, tensor=2)
    found, _, _ = fitted(method, None, 2, 1)
    assert found == autopar.ThreeD(data=2, tensor=2)


def test_stages_share_the_submeshes_that_are_left():
    found, mesh, used = fitted(PIPELINE, "x:4", 4, 3)
    assert (found.num_stages, found.num_submeshes, used) == (4, 2, 2)
    assert (found.schedule, found.num_microbatches) == ("interleaved", 6)
    assert mesh == parse_mesh("x:4"), "two hosts, one for each submesh"


def test_stages_of_several_hosts_get_fewer_of_them():
    found, mesh, used = fitted(
        autopar.PipelineParallel(num_stages=2, num_microbatches=2), "y:2;x:4", 4, 3
    )
    assert (found.num_submeshes, found.schedule, used) == (2, "1f1b", 2)
    assert mesh == parse_mesh("y:1;x:4")


def test_parts_of_hosts_stay_as_many():
    found, mesh, used = fitted(PIPELINE, "x:2", 2, 1)
    assert (found, mesh, used) == (PIPELINE, parse_mesh("x:1"), 1)


@pytest.mark.parametrize(
    ("meshes", "old", "new", "sizes"),
    [
        (["x:3", "x:1", "x:4"], 2, 1, [2, 1, 1]),
        (["x:2", "x:2", "x:8"], 3, 2, [4, 2, 2]),
        (["x:1", "x:3"], 2, 1, [2, 2]),
    ],
)
def test_unequal_parts_are_dealt_out_anew(
    meshes: list[str], old: int, new: int, sizes: list[int]
):
    method = autopar.PipelineParallel(len(meshes), 6, stage_meshes=meshes)
    found, _, used = fitted(method, None, old, new)
    assert [each.size for each in found.stage_meshes] == sizes
    assert (found.num_stages, found.num_microbatches, used) == (len(meshes), 6, new)


def test_more_parts_than_devices_are_one_program():
    method = autopar.PipelineParallel(num_stages=8, num_microbatches=8)
    assert fitted(method, "x:1", 2, 1)[0] == autopar.ShardParallel(8)


@pytest.mark.parametrize("semantics", ["exact", "independent"])
def test_on_one_host_a_pipeline_is_one_program_in_microbatches(semantics: Any):
    method = autopar.PipelineParallel(
        num_stages=2, num_microbatches=6, microbatch_semantics=semantics
    )
    found, _, used = fitted(method, None, 2, 1)
    assert found == autopar.ShardParallel(6, semantics)
    assert used == 1
