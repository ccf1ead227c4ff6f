"""What a report knows before it is drawn: trees, lines, curves, times, doubts."""

import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.execution import held_by_submesh
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan import InputPlan
from autopar.plans.plan_view import PlanView
from autopar.report.cautions import cautions
from autopar.report.collective_lines import collective_lines
from autopar.report.device_grid import MOST_COLUMNS, device_grids
from autopar.report.findings import HeldValue, MemoryCurve
from autopar.report.leaf_tree import leaf_tree, leaves_of_plan, leaves_of_stages
from autopar.report.memory_curves import MOST_POINTS, thinned
from autopar.report.step_origin import PipelineOrigin
from autopar.report.task_times import task_times
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import REPLICATED
from tests.report.steps import arguments, step
from tests.tiny_plans import make_plan

CPUS = Cluster.preset("1x8xCPU")


@pytest.mark.parametrize("name", ["planned", "pipeline"])
def test_parameters_are_told_from_the_optimizers_state(
    name: str, request: pytest.FixtureRequest
) -> None:
    plan: Plan = request.getfixturevalue(name)
    assert plan.origin is not None
    kinds = plan.origin.findings(alternatives=False, audit=False).kinds
    for layer in range(4):
        assert kinds[f"state['params'][{layer}]"] == "parameters"
        assert kinds[f"state['moments'][{layer}]"] == "optimizer state"


def test_bytes_of_the_tree_are_those_of_the_arguments(planned: Plan) -> None:
    trees = leaf_tree(leaves_of_plan(planned.sharding, {}))
    assert sum(tree.device_bytes for tree in trees) == sum(
        each.bytes for each in planned.sharding.inputs
    )
    state = next(tree for tree in trees if tree.name == "state")
    assert state.device_bytes == planned.sharding.state_bytes()
    assert state.whole_bytes == 8 * 64 * 64 * 4


def test_stages_keep_each_argument_once_and_no_value_in_between(
    pipeline: Plan,
) -> None:
    leaves = leaves_of_stages(pipeline.stages, {})
    state = sorted(leaf.path for leaf in leaves if leaf.path.startswith("state"))
    assert state == sorted(
        f"state['{tree}'][{layer}]"
        for tree in ("params", "moments")
        for layer in range(4)
    )
    assert not [leaf.path for leaf in leaves if "jvp" in leaf.path]


def test_collectives_add_up_to_what_the_plan_predicts(planned: Plan) -> None:
    lines = collective_lines(PlanView(planned.decision).programs, CPUS)
    predicted = planned.predicted
    assert lines
    assert sum(line.bytes for line in lines) == predicted.collective_bytes
    assert sum(line.seconds or 0.0 for line in lines) == pytest.approx(
        predicted.collective_seconds, rel=1e-4
    )
    assert all("report/steps.py" in line.source for line in lines)


def test_memory_over_the_step_peaks_where_the_plan_says(planned: Plan) -> None:
    assert planned.origin is not None
    found = planned.origin.findings(alternatives=False, audit=False)
    (curve,) = found.curves
    assert max(curve.bytes) == planned.predicted.peak_bytes
    assert curve.bytes[curve.peak] == max(curve.bytes)
    assert curve.base_bytes >= sum(each.bytes for each in planned.sharding.inputs)
    assert {user.name for user in curve.users} & {"state['params'][0]", "x"}
    assert set(found.missing) == {"alternatives", "pins", "audit"}


def test_memory_of_each_submesh_peaks_where_the_plan_says(pipeline: Plan) -> None:
    assert isinstance(pipeline.origin, PipelineOrigin)
    found = pipeline.origin.findings(alternatives=False, audit=False)
    peaks = tuple(max(curve.bytes) for curve in found.curves)
    assert peaks == pipeline.stages.peak_bytes
    rows = [row.split() for row in pipeline.stages.rows]
    held = held_by_submesh(pipeline.origin.planned)
    assert [[str(each.task) for each in tasks] for tasks in held] == rows


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_the_timeline_ends_with_the_predicted_step(schedule: str) -> None:
    method = autopar.PipelineParallel(4, 4, schedule)
    plan = autopar.parallelize(step, mesh="x:2", method=method).plan(*arguments())
    times = task_times(plan.stages, CPUS)
    assert times.seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    for submesh, row in enumerate(plan.stages.rows):
        assert [task.name for task in times.row(submesh)] == row.split()
        ends = [0.0, *(task.end for task in times.row(submesh))]
        starts = [task.start for task in times.row(submesh)]
        assert all(end <= start for end, start in zip(ends, starts, strict=False))
    assert not times.num_waiting


def test_microbatches_in_flight_are_those_of_the_schedule(pipeline: Plan) -> None:
    times = task_times(pipeline.stages, None)
    assert [times.most_in_flight(submesh) for submesh in range(2)] == [2, 1]
    assert not times.has_transfers


def test_a_row_that_waits_for_ever_is_cut_short(pipeline: Plan) -> None:
    stages = pipeline.stages
    first, second = stages.rows
    broken = replace(stages, rows=(first.replace("0F0 ", ""), second))
    times = task_times(broken, CPUS)
    assert times.num_waiting
    assert not [task for task in times.tasks if task.name == "1F0"]


def test_a_long_curve_is_thinned_to_the_fullest_of_each_stretch() -> None:
    number = 3 * MOST_POINTS + 7
    heights = [i * 7919 % 1009 for i in range(number)]
    labels = tuple(map(str, range(number)))
    users = (HeldValue("w", 3),)
    curve = MemoryCurve("", 0, tuple(heights), labels, users, number)
    thin = thinned(curve)
    assert len(thin.bytes) <= MOST_POINTS and thin.num_points == number
    assert max(thin.bytes) == max(heights)
    assert all(
        heights[int(x)] == y for x, y in zip(thin.labels, thin.bytes, strict=True)
    )
    assert thinned(thin) == thin


def test_devices_are_drawn_with_their_hosts() -> None:
    cluster = Cluster.preset("2x8xH100")
    mesh = MeshShape(("pipe", "data", "model"), (2, 2, 4))
    (grid,) = device_grids([mesh], cluster, ["all"])
    assert (grid.row_axis, grid.column_axis) == ("data", "model")
    assert [each.title for each in grid.slices] == ["pipe = 0", "pipe = 1"]
    cells = [c for each in grid.slices for row in each.rows for c in row]
    assert [cell.device for cell in cells] == list(range(16))
    assert [cell.host for cell in cells] == [0] * 8 + [1] * 8
    small = [MeshShape(("x",), (4,)), MeshShape(("x",), (8,))]
    first, second = device_grids(small, cluster, ["0", "1"])
    assert second.slices[0].rows[0][0].device == 4 and not first.row_axis


def test_of_a_huge_mesh_the_first_devices_are_drawn() -> None:
    (grid,) = device_grids([MeshShape(("a", "b"), (64, 64))], None, ["all"])
    assert not grid.is_whole
    row = grid.slices[0].rows[1]
    assert len(row) == MOST_COLUMNS and row[0].device == 64 and row[0].host is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peak_bytes": 2000, "budget_bytes": 1000}, "above the budget"),
        ({"peak_bytes": 950, "budget_bytes": 1000}, "fills 95% of the budget"),
        ({"memory_correction": 1.25}, "by a factor of 1.25"),
        ({"optimality_gap": 0.05}, "stopped 5.0% above its bound"),
        ({"optimality_gap": float("inf")}, "No bound is known"),
    ],
)
def test_doubts_are_told(change: dict[str, Any], words: str) -> None:
    plan = make_plan()
    plan = replace(plan, predicted=replace(plan.predicted, **change))
    assert words in " ".join(cautions(plan, PlanView(plan).programs))


def test_repeated_work_and_loops_of_unknown_length_are_told() -> None:
    plan = make_plan()
    alone = replace(plan.operators[1], split=2)
    some = replace(plan.predicted, split_flops_fraction=0.25)
    plan = replace(plan, operators=(plan.operators[0], alone), predicted=some)
    text = " ".join(cautions(plan, PlanView(plan).programs))
    assert "75.0% of the heavy flops are done by several devices" in text
    assert "/far/model.py:7 (layer)" in text
    assert "1 collectives stand in loops of unknown length" in text
    assert "1 collectives stand in branches" in text


def test_a_plan_is_data_without_its_origin(planned: Plan) -> None:
    copy = pickle.loads(pickle.dumps(planned))
    assert copy == planned and copy.origin is None and planned.origin is not None
    assert repr(copy) == repr(planned)


def test_plans_keep_no_array_alive() -> None:
    numbers = [jnp.ones((64, 64)) for _ in range(4)]
    state = {"params": numbers, "moments": [jnp.zeros_like(n) for n in numbers]}
    plan = autopar.parallelize(step, mesh="x:8").plan(state, jnp.ones((64, 64)))
    assert plan.origin is not None
    leaves = getattr(plan.origin, "leaves")  # noqa: B009
    assert len(leaves) == 9
    assert not [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def test_a_leaf_of_rank_zero_and_odd_paths_keep_their_place() -> None:
    paths = ("x", "x.y", "x['a.b']", "x['a']b'][0]", "x[", "..", "")
    inputs = tuple(InputPlan(p, "other", (REPLICATED,) * 2, (), 4) for p in paths)
    trees = leaf_tree(leaves_of_plan(replace(make_plan(), inputs=inputs), {}))
    assert [tree.name for tree in trees] == ["other"]
    assert sorted(leaf.path for leaf in trees[0].all_leaves()) == sorted(paths)
