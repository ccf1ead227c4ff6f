"""Zero-bubble pipelines: backward in two parts, and schedules of a user's own."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.methods.methods import PipelineParallel
from tests.test_pipeline_plan import arguments, step


def products(plan: autopar.Plan, stage: int, kind: str) -> int:
    """How many matrix products one task of a stage runs."""
    programs = [each for each in plan.stages.of_stage(stage) if each.kind == kind]
    return sum(
        op.kind == "dot_general" for each in programs for op in each.sharding.operators
    )


def test_weight_tasks_make_the_gradients_that_no_stage_waits_for() -> None:
    method = PipelineParallel(4, 8, "zb_h1")
    plan = autopar.parallelize(step, method=method).plan(*arguments())
    found = [
        tuple(products(plan, stage, kind) for kind in ("forward", "backward", "weight"))
        for stage in range(4)
    ]
    # The first stage has no product for its input, and keeps its backward whole.
    assert found == [(1, 1, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
    plain = autopar.parallelize(step, method=PipelineParallel(4, 8)).plan(*arguments())
    assert [products(plain, stage, "backward") for stage in range(4)] == [1, 2, 2, 2]
    sent = {(each.slot, each.source, each.target) for each in plan.stages.transfers}
    assert sent == {(t.slot, t.source, t.target) for t in plain.stages.transfers}


def test_a_zero_bubble_plan_is_kept(tmp_path: Path) -> None:
    method = PipelineParallel(2, 4, "zb_h2")
    plan = autopar.parallelize(step, method=method).plan(*arguments())
    plan.save(tmp_path / "plan.json")
    kept = autopar.Plan.load(tmp_path / "plan.json")
    assert kept.stages == plan.stages
    assert "weight" in str(kept)
    again = autopar.parallelize(step, plan=kept).plan(*arguments())
    assert again.stages.programs == plan.stages.programs


def late_weights(num_stages: int, num_microbatches: int) -> list[str]:
    """All forwards, all backwards, all weights."""
    return [
        " ".join(
            [f"{stage}{kind}{i}" for kind in "FBW" for i in range(num_microbatches)]
            + [f"{stage}A"]
        )
        for stage in range(num_stages)
    ]


def test_a_schedule_of_ones_own_runs_and_is_kept(tmp_path: Path) -> None:
    method = PipelineParallel(2, 4, late_weights)
    plan = autopar.parallelize(step, method=method).plan(*arguments())
    assert plan.stages.schedule == "late_weights"
    assert plan.stages.rows[1].startswith("1F0 1F1 1F2 1F3 1B0")
    plan.save(tmp_path / "plan.json")
    kept: Any = autopar.parallelize(
        step, plan=autopar.Plan.load(tmp_path / "plan.json")
    )
    expected, _ = jax.jit(step)(*arguments())
    got, _ = kept(*arguments())
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_schedule_that_deadlocks_is_drawn_where_it_waits() -> None:
    def backward_first(num_stages: int, num_microbatches: int) -> list[str]:
        return ["0F0 0F1 0B1 0B0 0A", "1F0 1B0 1F1 1B1 1A"]

    crossed: Any = autopar.parallelize(
        step, method=PipelineParallel(2, 2, backward_first)
    )
    got, _ = crossed(*arguments())  # only late: what is sent first waits for its turn
    expected, _ = jax.jit(step)(*arguments())
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)

    def too_early(num_stages: int, num_microbatches: int) -> list[str]:
        return ["0F0 0B0 0F1 0B1 0A", "1F0 1F1 1B0 1B1 1A"]

    refused: Any = autopar.parallelize(step, method=PipelineParallel(2, 2, too_early))
    with pytest.raises(ValueError, match=r"wait for each other[\s\S]*>0B0<") as error:
        refused.plan(*arguments())
    assert ">1F1<" in str(error.value)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="or a function.*use 'zb_h1'"):
        autopar.parallelize(step, method=PipelineParallel(2, 2, "zb-h1"))
    odd: Any = autopar.parallelize(
        step,
        method=PipelineParallel(2, 2, lambda stages, microbatches: 3),  # type: ignore[arg-type,return-value]
    )
    with pytest.raises(TypeError, match="a row of tasks for each submesh.*returned 3"):
        odd.plan(*arguments())


def test_a_trace_shows_the_predicted_and_the_measured_step(tmp_path: Path) -> None:
    method = PipelineParallel(2, 4, "zb_h1")
    run: Any = autopar.parallelize(step, method=method)
    compiled = run.lower(*arguments()).compile()
    (got, value), trace = compiled.record(*arguments())
    expected, expected_value = jax.jit(step)(*arguments())
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    trace.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    rows = [row.split() for row in run.plan(*arguments()).stages.rows]
    for process in (1, 2):
        for submesh, row in enumerate(rows, start=1):
            mine = [e for e in slices if (e["pid"], e["tid"]) == (process, submesh)]
            mine.sort(key=lambda event: event["ts"])
            has_program = [name for name in row if not name.startswith("0W")]
            assert list(dict.fromkeys(e["name"] for e in mine)) == has_program
            ends = [e["ts"] + e["dur"] for e in mine]
            starts = [e["ts"] for e in mine]
            late = zip(ends[:-1], starts[1:], strict=True)
            assert all(end <= start + 1e-3 for end, start in late)
    labels = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert labels == {"step, predicted", "step, measured"}
    # Stages run at once: some task starts on one submesh before one of another ends.
    measured = [e for e in slices if e["pid"] == 2]
    assert any(
        a["tid"] != b["tid"] and a["ts"] < b["ts"] < a["ts"] + a["dur"]
        for a in measured
        for b in measured
    )
