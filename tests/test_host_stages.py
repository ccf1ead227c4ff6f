"""Stages that are searched for hosts of a Ray cluster; no such cluster is started."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster, RayHosts
from autopar.methods.methods import PipelineParallel
from tests.rows.fixtures import tanh_chain

ELSEWHERE = RayHosts("10.0.0.1:6379", "cpu", 600.0)


def hosts(number: int, inside: int) -> Cluster:
    preset = Cluster.preset(f"{number}x{inside}xCPU")
    return replace(preset, ray_hosts=ELSEWHERE)


def arguments(num_layers: int = 6) -> Any:
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    params = [jax.random.normal(key, (128, 128)) * 0.1 for key in keys[1:]]
    return params, jax.random.normal(keys[0], (48, 128))


@pytest.mark.parametrize("number", [4, 3])
def test_every_stage_has_as_many_whole_hosts(number: int) -> None:
    step = parallelize(
        tanh_chain,
        method=PipelineParallel(num_microbatches=4),
        cluster=hosts(number, 2),
    )
    lowered = step.lower(*arguments())  # its executable refuses other submeshes
    meshes = lowered.plan.stages.meshes
    (size,) = {mesh.size for mesh in meshes}
    assert len(meshes) > 1 and size * len(meshes) == 2 * number
    assert size % 2 == 0


def test_the_fastest_number_of_hosts_is_taken() -> None:
    """Against stages of each number of hosts, on every shape that the search knows."""
    args, cluster = arguments(), hosts(4, 2)
    found = parallelize(
        tanh_chain, method=PipelineParallel(num_microbatches=4), cluster=cluster
    ).plan(*args)
    assert found.stages.num_microbatches == 4
    for number, shape in ((2, "x:4"), (2, "x:2;y:2"), (4, "x:2")):
        method = PipelineParallel(number, 4, stage_meshes=[shape] * number)
        other = parallelize(tanh_chain, method=method, cluster=cluster).plan(*args)
        least = 0.97 * found.predicted.step_seconds  # the search stops at 1%
        assert other.predicted.step_seconds > least, (number, shape)


@pytest.mark.parametrize("mesh", [None, "x:3"])
def test_hosts_that_cannot_be_dealt_out_are_refused(mesh: str | None) -> None:
    cluster = hosts(1, 2) if mesh is None else hosts(2, 2)
    step = parallelize(
        tanh_chain, method=PipelineParallel(), cluster=cluster, mesh=mesh
    )
    with pytest.raises(ValueError, match="On Ray a stage has whole hosts"):
        step.plan(*arguments())
