"""What a report knows before it is drawn: trees, lines, curves, times, doubts."""

import pickle
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.plans.plan import InputPlan
from autopar.plans.plan_view import PlanView
from autopar.report.answers import Answers
from autopar.report.findings import Findings
from autopar.report.report import MOST_LIGHT, Report, cautions
from autopar.sharding.spec import REPLICATED
from autopar.steps.execution import held_by_submesh
from autopar.steps.parallel_plan import Plan
from autopar.steps.step_origin import PipelineOrigin
from tests.marks import slow
from tests.report.steps import arguments, step
from tests.tiny_plans import format_plan, make_plan

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


def reported(plan: Plan, **found: Any) -> Report:
    return Report(Answers(PlanView(plan.decision)), Findings(cluster=CPUS, **found))


def test_bytes_of_arguments_are_those_of_the_plan(planned: Plan) -> None:
    found = reported(planned).arguments
    assert sum(leaf.bytes for each in found for leaf in each.leaves) == sum(
        each.bytes for each in planned.sharding.inputs
    )
    for each in found:
        grouped = sum(group.bytes for group in each.groups)
        assert grouped == sum(leaf.bytes for leaf in each.leaves)
    (state,) = [each for each in found if each.kind == "state"]
    bytes_ = sum(leaf.bytes for leaf in state.leaves)
    assert bytes_ == planned.sharding.state_bytes()
    assert sum(leaf.whole_bytes for leaf in state.leaves) == 8 * 64 * 64 * 4
    for leaf in state.leaves:
        assert 4 * prod(leaf.local_shape) == leaf.bytes


def test_stages_keep_each_argument_once_and_no_value_in_between(
    pipeline: Plan,
) -> None:
    leaves = PlanView(pipeline.decision).leaves
    state = sorted(leaf.path for leaf in leaves if leaf.path.startswith("state"))
    assert state == sorted(
        f"state['{tree}'][{layer}]"
        for tree in ("params", "moments")
        for layer in range(4)
    )
    assert not [leaf.path for leaf in leaves if "jvp" in leaf.path]


def test_lines_add_up_to_what_the_plan_predicts(planned: Plan) -> None:
    found, predicted = reported(planned), planned.predicted
    assert found.sent
    assert sum(line.bytes for line in found.sent) == predicted.collective_bytes
    assert found.sent_seconds == pytest.approx(predicted.collective_seconds, rel=1e-4)
    assert all("report/steps.py" in line.line for line in found.sent)
    seconds = sum(line.seconds for line in found.compute)
    assert seconds == pytest.approx(predicted.compute_seconds, rel=1e-9)
    assert sum(line.part for line in found.compute) == pytest.approx(1)
    assert sum(line.count for line in found.compute) == sum(
        op.seconds > 0 for op in planned.sharding.operators
    )


def test_lines_of_the_busiest_submesh_add_up_to_what_the_plan_predicts(
    pipeline: Plan,
) -> None:
    found = reported(pipeline)
    for lines, amount, wanted in (
        (found.compute, "seconds", pipeline.predicted.compute_seconds),
        (found.sent, "bytes", pipeline.predicted.collective_bytes),
    ):
        sums = [0.0, 0.0]
        for line in lines:
            sums[int(line.program.split()[1])] += getattr(line, amount)
        assert max(sums) == pytest.approx(wanted, rel=1e-9)


def test_of_many_lines_of_light_operators_the_least_are_one_row() -> None:
    plan = make_plan()
    light = [
        replace(plan.operators[2], source=f"/far/model.py:{i}:1 (f)", seconds=i * 1e-6)
        for i in range(1, MOST_LIGHT + 4)
    ]
    plan = replace(plan, operators=(*plan.operators[:2], *light))
    lines = reported(Plan(plan)).compute
    (rest,) = [line for line in lines if line.operator == "light operators"]
    assert rest.line == "3 more lines" and rest.count == 3
    assert rest.seconds == pytest.approx(6e-6)
    assert sum(line.seconds for line in lines) == pytest.approx(
        sum(op.seconds for op in plan.operators)
    )


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


@pytest.mark.parametrize("schedule", ["1f1b", slow("gpipe"), "zb_h1"])
def test_the_timeline_ends_with_the_predicted_step(schedule: str) -> None:
    method = autopar.PipelineParallel(4, 4, schedule)
    plan = autopar.parallelize(step, mesh="x:2", method=method).plan(*arguments())
    assert plan.origin is not None
    tasks = plan.origin.findings(alternatives=False, audit=False).tasks
    last = max(task.end for task in tasks)
    assert last == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    for submesh, row in enumerate(plan.stages.rows):
        own = sorted(
            (task for task in tasks if task.submesh == submesh),
            key=lambda task: (task.start, task.end),
        )
        idle = set(row.split()) - {str(each.task) for each in own}
        assert len(own) + len(idle) == len(row.split())
        assert all("W" in name for name in idle)  # stages without such a program
        for before, after in zip(own, own[1:], strict=False):
            assert before.end <= after.start


def test_microbatches_in_flight_are_those_of_the_schedule(pipeline: Plan) -> None:
    assert pipeline.origin is not None
    found = pipeline.origin.findings(alternatives=False, audit=False)
    assert found.in_flight == (2, 1)


def test_repeated_work_is_told() -> None:
    plan = make_plan()
    alone = replace(plan.operators[1], split=2)
    some = replace(plan.predicted, split_flops_fraction=0.25)
    plan = replace(plan, operators=(plan.operators[0], alone), predicted=some)
    text = " ".join(cautions(PlanView(plan).programs))
    assert "75.0% of the heavy flops are done by several devices" in text
    assert "/far/model.py:7 (layer)" in text


def test_a_plan_is_data_without_its_origin(planned: Plan) -> None:
    copy = pickle.loads(pickle.dumps(planned))
    assert copy == planned and copy.origin is None and planned.origin is not None
    assert format_plan(copy.decision) == format_plan(planned.decision)


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
    (found,) = reported(Plan(replace(make_plan(), inputs=inputs))).arguments
    assert found.kind == "other"
    listed = [leaf.path for group in found.groups for leaf in group.leaves]
    assert sorted(listed) == sorted(paths)
