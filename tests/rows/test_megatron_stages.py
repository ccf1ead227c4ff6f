"""Rows MEG-5 and MEG-6 of Megatron-LM: schedules as they run, ThreeD by its sizes."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.schedule import Task
from tests.rows.fixtures import HIDDEN, SEQ, Case, encoder, f6, random
from tests.rows.running import run_pipeline_as_planned

ROWS, NUM_MICROBATCHES = 8, 2
BSH_BYTES = ROWS // NUM_MICROBATCHES * SEQ * HIDDEN * 4  # of a microbatch


def two_layers() -> Case:
    """A layer of F3 for each of two stages, with two microbatches of four rows."""
    case = encoder(2)
    shape = ROWS, SEQ, HIDDEN
    return Case(case.step, (case.args[0], random(9, *shape), random(10, *shape)))


def three_d(*, sequence: bool) -> Any:
    method = autopar.ThreeD(
        2, 2, pipeline=2, sequence=sequence, num_microbatches=NUM_MICROBATCHES
    )
    return autopar.parallelize(two_layers().step, method=method)


def in_groups(plan: autopar.Plan, stage: int, kind: str) -> Counter[tuple[str, int]]:
    """Kind and bytes of the collectives among neighbours, which share a layer."""
    found: Counter[tuple[str, int]] = Counter()
    for program in plan.stages.of_stage(stage):
        for each in program.sharding.collectives if program.kind == kind else ():
            if each.groups == ((0, 1), (2, 3)):
                found[each.kind, each.bytes] += each.count
    return found


def sent_by_a_device(plan: autopar.Plan) -> set[int]:
    """Bytes that a device sends of what crosses the border, once a microbatch."""
    (there,) = (t for t in plan.stages.transfers if t.source == 0)
    (back,) = (t for t in plan.stages.transfers if t.source == 1)
    assert {there.count, back.count} == {NUM_MICROBATCHES}
    assert {there.bytes, back.bytes} == {BSH_BYTES}
    found = set()
    for slot, target in ((there.slot, 1), (back.slot, 0)):
        for program in plan.stages.of_stage(target):
            specs = [i.spec for i in program.sharding.inputs if i.path == slot]
            found.update(
                BSH_BYTES // 2 ** sum(state >= 0 for state in spec) for spec in specs
            )
    return found


def test_meg_6_stages_are_split_as_megatron_does_by_columns_and_rows() -> None:
    """Two all_reduces forward and two back for each layer, of its part of the batch;
    no gradient is asked for of what enters the first."""
    plan = three_d(sequence=False).plan(*two_layers().args)
    assert [str(mesh) for mesh in plan.stages.meshes] == ["data:2;tensor:2"] * 2
    part = BSH_BYTES // 2
    for stage in (0, 1):
        assert in_groups(plan, stage, "forward") == {("all_reduce", part): 2}
        backward = {("all_reduce", part): 1 + stage}
        assert in_groups(plan, stage, "backward") == backward
    assert sent_by_a_device(plan) == {BSH_BYTES // 2}  # b is split over data


def test_meg_6_with_a_split_sequence_a_border_takes_a_part_of_it() -> None:
    """b s h / t; layers gather the sequence and scatter their sums."""
    plan = run_pipeline_as_planned(three_d(sequence=True), *two_layers().args).plan
    part = BSH_BYTES // 2
    for stage in (0, 1):
        assert in_groups(plan, stage, "forward") == {
            ("all_gather", part): 2,
            ("reduce_scatter", part // 2): 2,
        }
        assert in_groups(plan, stage, "backward")["all_gather", part] == 4
    assert sent_by_a_device(plan) == {BSH_BYTES // 2 // 2}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2"])
def test_meg_5_a_step_runs_in_the_order_of_its_schedule(schedule: str) -> None:
    """And with the gradients of one device: new parameters are old ones less these."""
    case = f6()
    shared = 2 if schedule == "interleaved" else 1
    method = autopar.PipelineParallel(
        4, 4, schedule, stages_per_submesh=shared, stage_meshes=["x:1"] * (4 // shared)
    )
    step = autopar.parallelize(case.step, method=method, donate_argnums=())
    lowered: Any = step.lower(*case.args)
    traces: list[Any] = []
    got = lowered.step(jax.tree.leaves(case.args), traces)
    (trace,) = traces
    stages = lowered.plan.stages
    # The first stage keeps its backward whole, and has nothing to do for weights.
    kinds = {(each.stage, each.kind) for each in stages.programs}
    for submesh, row in enumerate(stages.rows):
        tasks = [Task.parse(text) for text in row.split()]
        wanted = [task for task in tasks if (task.stage, task.kind) in kinds]
        events = [e for e in trace.measured.events if e.submesh == submesh]
        ran = [e.task for e in sorted(events, key=lambda e: e.start)]
        assert list(dict.fromkeys(ran)) == wanted
    expected = jax.tree.leaves(jax.jit(case.step)(*case.args))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
