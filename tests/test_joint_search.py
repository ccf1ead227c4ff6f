"""The joint search plans few layers, and finds what planning all of them finds."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.graph.op_graph import OpGraph, params_key
from autopar.options import check_options
from autopar.pipelines.joint_search import LOOSE_GAP, JointSearch, submeshes_of
from autopar.pipelines.layer_samples import PLAN_GAP
from autopar.pipelines.stage_search import StageSearcher
from autopar.solver.stage_problem import StageProblem
from benchmarks.models import build
from tests.marks import slow
from tests.rows.fixtures import dense_stack
from tests.solver.stage_counts import best_over
from tests.test_stage_search import two_hosts


def searcher_of(step: Any, args: Any, cluster: Cluster, **given: Any) -> StageSearcher:
    method = autopar.PipelineParallel(**given)
    options = check_options(method=method, cluster=cluster)
    return StageSearcher((step, args, {}), method, options)


def dense(devices_per_host: int = 4) -> StageSearcher:
    case = dense_stack(512, 256, num_layers=4)
    cluster = replace(two_hosts(), devices_per_host=devices_per_host)
    return searcher_of(case.step, case.args, cluster)


def gpt(num_layers: int = 4, **given: Any) -> StageSearcher:
    workload = build(
        "gpt", num_layers=num_layers, remat=True, hidden=256, batch_size=64
    )
    return searcher_of(workload.step, workload.abstract(), two_hosts(), **given)


def operators_of(graph: OpGraph) -> Counter[Any]:
    return Counter(
        (op.kind, params_key(op.params), op.operand_types, op.result_types)
        for op in graph.operators()
    )


@pytest.mark.parametrize("number", [slow(2), 16])
def test_a_layer_alone_is_the_program_that_the_traced_parts_have(number: int):
    searcher = gpt(num_layers=3)
    quick, slow = searcher.samples(in_place=True), searcher.samples(in_place=False)
    for one, other in zip(quick.of(number), slow.of(number), strict=True):
        assert operators_of(one.graph(number)) == operators_of(other.graph(number))
        assert one.ideal(4, number, searcher.cluster).seconds == pytest.approx(
            other.ideal(4, number, searcher.cluster).seconds, rel=0.02
        )


def everywhere(search: JointSearch) -> None:
    """Plans every layer on every submesh, for every number of microbatches."""
    costs = search.costs
    for number in search.counts:
        for submesh in search.submeshes:
            for kind in sorted(set(costs.layers.kinds)):
                if not costs.is_known(submesh, number, kind):
                    costs.look_at(submesh, number, kind)


@pytest.mark.parametrize("name", ["dense", slow("gpt")])
def test_what_is_found_is_as_fast_as_with_all_layers_planned(name: str):
    searcher = dense(devices_per_host=2) if name == "dense" else gpt(num_microbatches=8)
    search = searcher.search()
    search.counts = search.counts[::5]
    found = search.best(searcher.capacity_bytes)
    assert found is not None
    num_planned = search.count["layers"]
    everywhere(search)
    assert num_planned < len(search.costs.known) / 2
    first = search.problem((search.counts[0], "1f1b", 1), searcher.capacity_bytes)

    def choices_of(number: int) -> Any:
        each: StageProblem = search.problem((number, "1f1b", 1), 0.0)
        return each.choices, each.crossing_seconds

    exact = best_over(first, choices_of, search.counts, search.schedules)
    assert exact is not None
    assert found.assignment.seconds >= exact[1].seconds * (1 - 1e-9)
    slack = (1 + LOOSE_GAP) * (1 + PLAN_GAP)
    assert found.assignment.seconds <= exact[1].seconds * slack


@pytest.mark.parametrize(
    ("hosts", "is_ascending"),
    [
        (2, True),
        slow(2, False),
        slow(4, True),
        slow(4, False),
    ],
)
def test_what_is_not_planned_is_not_thought_to_cost_more(
    hosts: int, is_ascending: bool
):
    """Of the main kind, whatever was looked at before: an update, and a microbatch with
    its part of it."""
    cluster = replace(two_hosts(), num_hosts=hosts, devices_per_host=8 // hosts)
    case = dense_stack(512, 256, num_layers=4)
    search = searcher_of(case.step, case.args, cluster).search()
    costs, main = search.costs, search.costs.main_kind
    for number in search.counts[:: 3 if is_ascending else -3]:
        for submesh in search.submeshes[:: 1 if is_ascending else -1]:
            guess = costs.cost(submesh, number, main)
            costs.look_at(submesh, number, main)
            planned = costs.cost(submesh, number, main)
            assert guess.once_seconds <= planned.once_seconds * (1 + PLAN_GAP)
            mean = guess.seconds + guess.once_seconds / number
            found = planned.seconds + planned.once_seconds / number
            assert mean <= found * (1 + PLAN_GAP)


def test_sums_of_the_update_are_paid_once_a_step():
    """Planned with many microbatches, they are thought as dear with few."""
    search = dense().search()
    costs, main = search.costs, search.costs.main_kind
    many, few = search.counts[-1], search.counts[0]
    for submesh in search.submeshes:
        if submesh.mesh.axis_sizes == (4,) and not submesh.is_split:
            costs.look_at(submesh, many, main)
            sums = costs.cost(submesh, many, main).reducing_seconds
            ideal = costs.ideal(submesh, few, main)
            found = costs.cost(submesh, few, main).seconds
            assert sums > 0
            assert found >= ideal.seconds + sums / few


def test_a_submesh_is_a_part_of_a_host_or_whole_hosts():
    cluster = Cluster.preset("4x8xV100")
    case = dense_stack(512, 256)
    options = searcher_of(case.step, case.args, cluster).options
    sizes = {each.mesh.size for each in submeshes_of(cluster, options, 512)}
    assert sizes == {1, 2, 4, 8, 16}
    shapes = [each.mesh.axis_sizes for each in submeshes_of(cluster, options, 512)]
    assert (4, 2) in shapes and (2, 8) in shapes and (2, 4) not in shapes
