"""Stages that are searched under layout rules, with offload, remat or a mesh."""

from dataclasses import replace
from typing import Any

import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.clusters.cluster import Cluster
from autopar.costs import memory
from autopar.errors import InfeasiblePlanError
from autopar.methods.methods import PipelineParallel
from tests.marks import slow
from tests.rows.fixtures import dense_stack
from tests.test_pipeline_memory import ADAM, deep, trained
from tests.test_stage_search import two_hosts


def four_devices() -> Cluster:
    """Of another kind than those that are here, so that no program is compiled."""
    local = Cluster.local()
    device = replace(local.device, kind="another")
    return replace(local, devices_per_host=4, device=device)


def planned(step: Any, args: Any, **asked: Any) -> Any:
    asked = {"method": PipelineParallel(num_microbatches=2), **asked}
    return autopar.parallelize(step, **asked).plan(*args)


@pytest.mark.parametrize(
    ("stages", "asked"),
    [
        (None, {"rules": "batch:y"}),
        slow(3, {"rules": "batch:x"}),
        slow(3, {"rules": "batch:rows", "mesh": "rows:-1"}),
    ],
)
def test_rules_hold_on_submeshes_that_are_searched(stages: int | None, asked: Any):
    """Of 480 rows a microbatch has 60, which 8 devices cannot have parts of."""
    case = dense_stack(480, 256, num_layers=4 if stages else 2)
    method = PipelineParallel(stages, 8)
    plan = planned(case.step, case.args, method=method, cluster=two_hosts(), **asked)
    assert plan.stages.num_stages == (stages or plan.stages.num_stages) > 1
    axis = str(asked["rules"]).partition(":")[2]
    split = set[int]()
    for program in plan.stages.programs:
        mesh = program.sharding.mesh
        place = mesh.axis_names.index(axis)
        for leaf in program.sharding.inputs:
            if "batch" in leaf.path and mesh.axis_sizes[place] > 1:
                split.add(leaf.spec[place])
    assert split == {0}


def test_rules_of_stages_that_are_searched_name_axes_that_they_have():
    case = dense_stack(48, 32, num_layers=2)
    with pytest.raises(ValueError, match="x and y.*LayoutRules.*give `mesh`"):
        planned(case.step, case.args, rules="batch:rows")


def test_rules_that_no_submesh_keeps_to_are_refused():
    case = dense_stack(2 * 7, 32, num_layers=2)
    with pytest.raises(ValueError, match="divide"):
        planned(case.step, case.args, rules="batch:x", mesh="x:2")


def test_a_mesh_is_that_of_each_of_stages_that_do_not_divide_the_devices():
    case = dense_stack(64, 32, num_layers=3)
    method = PipelineParallel(3, 2)
    plan = planned(case.step, case.args, method=method, mesh="data:2")
    assert [str(mesh) for mesh in plan.stages.meshes] == ["data:2"] * 3
    with pytest.raises(ValueError, match="3 stages of `mesh` 'x:4' need 12"):
        planned(case.step, case.args, method=method, mesh="x:4")


def test_searched_stages_take_the_host_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    """With all state replicated by pins, only the host has room for the moments."""
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)  # more than all else of a toy
    fun, args = trained(ADAM)
    asked: dict[str, Any] = {
        "method": PipelineParallel(3, 2),
        "cluster": four_devices(),
        "pins": {"state": PartitionSpec()},
    }
    free = planned(fun, args, offload="auto", **asked)
    assert free.predicted.host_bytes == 0
    asked["memory_budget"] = int(0.8 * free.predicted.peak_bytes)
    with pytest.raises(InfeasiblePlanError, match="Every stage must fit"):
        planned(fun, args, **asked)
    found = planned(fun, args, offload="auto", **asked)
    kept = {
        i.path.partition("]")[0]
        for each in found.stages.programs
        for i in each.sharding.inputs
        if i.memory == "host"
    }
    assert found.predicted.host_bytes > 0 and kept == {"state[1"}
    assert found.predicted.peak_bytes <= asked["memory_budget"]


def test_searched_stages_make_again_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)
    fun, args = deep(2048)
    method = PipelineParallel(None, 4, "gpipe")
    asked: dict[str, Any] = {"method": method, "cluster": four_devices()}
    plain = planned(fun, args, **asked)
    budget = int(0.85 * plain.predicted.peak_bytes)
    asked["memory_budget"] = budget
    with pytest.raises(InfeasiblePlanError):
        planned(fun, args, **asked)
    found = planned(fun, args, remat="auto", **asked)
    assert {p.sharding.remat for p in found.stages.programs} > {""}
    assert found.predicted.peak_bytes <= budget
