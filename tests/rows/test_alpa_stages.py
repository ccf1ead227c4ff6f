"""Rows ALP-3 and ALP-4: how layers are dealt out to stages, and stages to hosts."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

import autopar
from tests.rows.fixtures import dense_stack, random, tanh_chain
from tests.rows.running import run_pipeline_as_planned


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_alp_3_stages_are_those_of_exhaustive_search(num_stages: int) -> None:
    """Six layers of differing work: no cut has a faster slowest stage, but for the
    15% over an even share that fewer bytes may cost."""
    sizes = (16, 64, 32, 96, 16, 48, 16)
    layers = [random(i, *pair, scale=0.1) for i, pair in enumerate(pairwise(sizes))]

    method = autopar.PipelineParallel(num_stages, 4, stage_meshes=["a:1"] * num_stages)
    plan = autopar.parallelize(tanh_chain, method=method).plan(
        layers, random(9, 16, 16)
    )
    work = [layer.size for layer in layers]
    stages = [
        [work[int(i.path[7])] for i in each.sharding.inputs if "params[" in i.path]
        for each in plan.stages.programs
        if each.kind == "apply"
    ]
    assert sorted(sum(stages, [])) == sorted(work)
    slowest = max(map(sum, stages))
    best = min(
        max(sum(work[a:b]) for a, b in pairwise((0, *cut, 6)))
        for cut in combinations(range(1, 6), num_stages - 1)
    )
    assert best <= slowest <= max(best, 1.15 * sum(work) / num_stages)


def two_hosts(ratio: float) -> autopar.Cluster:
    """Two hosts of four devices; links inside are `ratio` times those between."""
    cluster = autopar.Cluster.preset("2x4xV100")
    inner = replace(
        cluster.host_link, bandwidth=1e11, efficiency=1.0, alpha_seconds=1e-6
    )
    return replace(
        cluster, host_link=inner, network_link=replace(inner, bandwidth=1e11 / ratio)
    )


def test_alp_4_slow_links_carry_stage_borders_alone() -> None:
    """By default, with 100:1: a stage a host, and collectives inside of it."""
    case = dense_stack(512, 256)
    step = autopar.parallelize(case.step, cluster=two_hosts(100.0))
    plan: autopar.Plan = run_pipeline_as_planned(step, *case.args).plan
    assert [mesh.size for mesh in plan.stages.meshes] == [4, 4]
    groups = [
        group
        for each in plan.stages.programs
        for collective in each.sharding.collectives
        for group in collective.groups
    ]
    # Groups count from the first device of a stage, which is that of a host.
    assert groups and all(max(group) < 4 for group in groups)
    assert {(t.source, t.target) for t in plan.stages.transfers} == {(0, 1), (1, 0)}
    border_bytes = 512 * 256 * 4 * 2  # activations, and their cotangents
    small = 64  # step counts and the like
    assert border_bytes <= plan.stages.transfer_bytes <= border_bytes + small


def test_alp_4_with_equal_links_stages_are_not_forced() -> None:
    case = dense_stack(512, 256)
    plan = autopar.parallelize(case.step, cluster=two_hosts(1.0)).plan(*case.args)
    assert plan.sharding.mesh.size == 8
    across = [
        group
        for collective in plan.sharding.collectives
        for group in collective.groups
        if min(group) < 4 <= max(group)
    ]
    assert across
