"""What is added up over microbatches is reduced once a step, where it may wait."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.api import parallelize
from autopar.errors import PlanFileError
from autopar.methods.methods import PipelineParallel
from autopar.sharding.spec import is_pending
from autopar.steps.parallel_plan import Plan
from tests.marks import slow
from tests.rows.running import run_pipeline_as_planned
from tests.test_pipeline import tied_language_model
from tests.test_pipeline_plan import arguments, step

BATCH = 1024  # with so many rows, to reduce gradients is cheaper than activations
GRADIENT_BYTES = 4 * 64 * 64 * 4


def method(number: int, schedule: Any = "1f1b") -> PipelineParallel:
    return PipelineParallel(2, number, schedule, stage_meshes=["x:2"] * 2)


def abstract() -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(BATCH)
    )


@pytest.mark.parametrize("number", [2, 8])
def test_a_step_reduces_as_many_bytes_whatever_the_number_of_microbatches(number: int):
    plan = parallelize(step, method=method(number)).plan(*abstract()).stages
    found: Counter[str] = Counter()
    for program in plan.programs:
        for each in program.sharding.collectives:
            found[each.kind] += each.total_bytes * plan.times(program)
    loss_bytes = 4
    assert found == {"all_reduce": GRADIENT_BYTES + loss_bytes}
    assert plan.predicted.collective_bytes == max(
        sum(
            program.sharding.predicted.collective_bytes * plan.times(program)
            for program in plan.of_stage(stage)
        )
        for stage in range(2)
    )


@pytest.mark.parametrize("schedule", ["1f1b", slow("zb_h1")])
def test_parts_of_sums_are_added_up_by_the_update(schedule: Any):
    """Every device holds all of its own part until then, and the plan counts it."""
    function: Any = parallelize(step, method=method(4, schedule))
    compiled = run_pipeline_as_planned(function, *arguments(BATCH))
    planned = compiled.lowered.step.pipeline.planned
    sums = [
        name for name, slot in planned.flow.slots.items() if slot.kind == "gradient"
    ]
    assert len(sums) == 5
    for name in sums:
        stage = planned.flow.slots[name].stage
        assert is_pending(planned.specs[name, stage])
        assert planned.slot_bytes(name, stage) == planned.types[name].bytes
    for program in compiled.plan.stages.programs:
        assert (program.kind == "apply") == bool(program.sharding.collectives)


def test_a_sum_that_another_stage_reads_is_complete():
    """Of a tied embedding, whose gradients meet on its first stage.

    Its values are those of test_pipeline.py.
    """
    fun, state, batch = tied_language_model()
    function: Any = parallelize(fun, method=method(2))
    lowered = function.lower(state, batch)
    planned = lowered.step.pipeline.planned
    slots = planned.flow.slots
    read_elsewhere = {
        name
        for program in planned.flow.programs
        for name in program.inputs
        if slots[name].kind == "gradient" and slots[name].stage != program.stage
    }
    assert read_elsewhere
    for name in read_elsewhere:
        assert not is_pending(planned.specs[name, slots[name].stage])


def test_a_plan_file_keeps_the_parts_and_says_of_nothing_else_that_it_owes_a_sum(
    tmp_path: Path,
):
    path = tmp_path / "plan.json"
    plan = parallelize(step, method=method(2)).plan(*abstract())
    plan.save(path)
    assert Plan.load(path) == plan
    assert parallelize(step, plan=Plan.load(path)).plan(*abstract()) == plan
    document = json.loads(path.read_text())
    leaf = next(
        each
        for program in document["programs"]
        for each in program["inputs"]
        if each["role"] == "state"
    )
    leaf["spec"] = "x:sum"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match="owe no reduction"):
        Plan.load(path)
    leaf["role"] = "sum"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"spec|complete"):
        parallelize(step, plan=Plan.load(path)).plan(*abstract())
