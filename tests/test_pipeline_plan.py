"""Plans of pipelines: what they show, keep and run, and what they predict."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.errors import PlanFileError
from autopar.methods.methods import PipelineParallel, ShardParallel
from autopar.runtime.emit import emit
from autopar.runtime.instructions import Send
from autopar.runtime.schedule import one_f_one_b
from autopar.steps.parallel_plan import Plan


def step(params: Any, x: jax.Array) -> Any:
    """Four tanh layers of 64, and a mean of squares."""

    def loss(params: Any) -> jax.Array:
        y = x
        for kernel in params:
            y = jnp.tanh(y @ kernel)
        return jnp.mean(jnp.square(y))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(batch: int = 32) -> tuple[Any, jax.Array]:
    numbers = np.random.default_rng(0)
    kernels = [numbers.normal(size=(64, 64)) / 8 for _ in range(4)]
    x = numbers.normal(size=(batch, 64))
    return [jnp.asarray(k, jnp.float32) for k in kernels], jnp.asarray(x, jnp.float32)


def abstract() -> Any:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())
    return shapes


@cache
def planned(num_microbatches: int) -> Plan:
    """On two stages."""
    method = PipelineParallel(num_stages=2, num_microbatches=num_microbatches)
    return parallelize(step, method=method).plan(*abstract())


@cache
def pinned() -> Any:
    """A pipeline whose pins the solver would not choose; one plan and program."""
    method = PipelineParallel(num_stages=2, num_microbatches=4)
    pins = {"params[0]": P("y", "x"), "params[3]": P(None, "y")}
    return parallelize(
        step, method=method, mesh="x:2;y:2", pins=pins, donate_argnums=()
    )


def test_a_plan_needs_no_devices():
    cluster = Cluster.preset("8x8xH100")
    method = PipelineParallel(num_stages=4, num_microbatches=8)
    plan = parallelize(step, method=method, cluster=cluster, mesh="data:4;model:4")
    stages = plan.plan(*abstract()).stages
    assert [str(mesh) for mesh in stages.meshes] == ["data:4;model:4"] * 4
    assert {(each.stage, each.kind) for each in stages.programs} >= {
        (stage, kind) for stage in range(4) for kind in ("forward", "apply")
    }
    with pytest.raises(ValueError, match="need 64 devices, but this process has 8"):
        plan(*arguments())


def test_it_shows_stages_transfers_and_the_schedule(capsys: Any):
    plan = planned(4)
    plan.explain()
    text = capsys.readouterr().out
    assert str(plan).splitlines()[0] == "plan of step, a pipeline, for one step"
    for expected in (
        "2 on 2 submeshes",
        "4, exact, 1f1b",
        "submesh 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0A",
        "test_pipeline_plan.py:",
        "jvp()/tanh",
    ):
        assert expected in text
    assert "stage 0, forward" not in text
    plan.explain(operators=True)
    assert "stage 0, forward" in capsys.readouterr().out


def test_transfers_are_the_sends_of_the_instruction_lists():
    method = PipelineParallel(num_stages=4, num_microbatches=4)
    function: Any = parallelize(step, method=method)
    stages = function.plan(*abstract()).stages
    lowered = function.lower(*abstract())
    program = lowered.step.pipeline.program
    sends = [
        (each.value.slot, each.source, each.target)
        for list_ in emit(program, one_f_one_b(4, 4))
        for each in list_.instructions
        if isinstance(each, Send)
    ]
    planned = [
        (each.slot, each.source, each.target)
        for each in stages.transfers
        for _ in range(each.count)
    ]
    assert sorted(sends) == sorted(planned)
    assert stages.transfer_bytes == sum(t.total_bytes for t in stages.transfers)


def test_predicted_figures_are_those_of_the_simulated_step():
    plan = planned(4)
    stages, predicted = plan.stages, plan.predicted
    busiest = max(
        4 * stages.task_seconds(stage, "forward")
        + 4 * stages.task_seconds(stage, "backward")
        + stages.task_seconds(stage, "apply")
        for stage in (0, 1)
    )
    assert predicted.step_seconds > busiest
    assert 0 < predicted.bubble_fraction < 1
    for programs in (stages.of_stage(0), stages.of_stage(1)):
        collectives = sum(
            each.sharding.predicted.collective_bytes * stages.times(each)
            for each in programs
        )
        assert collectives <= predicted.collective_bytes
    # A quarter of the kernels, of 16 KiB each, lies on each stage at least once.
    assert min(stages.peak_bytes) >= 2 * 64 * 64 * 4 / 4
    assert max(stages.peak_bytes) == predicted.peak_bytes
    fewer = planned(2).predicted
    assert predicted.bubble_fraction < fewer.bubble_fraction


def test_all_stage_programs_are_audited():
    compiled = pinned().lower(*abstract()).compile()
    audit = compiled.audit()
    audit.raise_if_wrong()
    assert [name for name, _ in audit.audits] == [
        "stage 0, forward",
        "stage 1, forward",
        "stage 0, backward",
        "stage 1, backward",
        "stage 0, apply",
        "stage 1, apply",
    ]
    for text in (compiled.as_text(), compiled.lowered.as_text()):
        assert text.count("// stage 1, ") == 3
    assert len(compiled.memory_analysis()) == 6
    params, x = arguments()
    expected = jax.jit(step)(params, x)
    got = compiled(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    with pytest.raises(TypeError, match="types it was lowered for"):
        compiled(*arguments(batch=64))


def test_a_saved_plan_is_loaded_and_run_as_it_is(tmp_path: Path):
    """The plan pins what the solver would not choose, and its runner plans nothing."""
    method = PipelineParallel(num_stages=2, num_microbatches=4)
    plan = pinned().plan(*abstract())
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    params, x = arguments()
    expected = pinned()(params, x)
    got = parallelize(step, plan=loaded)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    assert got[0][0].sharding.spec == P("y", "x")
    again = parallelize(step, plan=loaded, method=method).plan(*abstract())
    assert again == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "`version` must be 1"),
        (lambda d: d["programs"].pop(), "has the programs"),
        (lambda d: d["meshes"].clear(), "`meshes` must have a mesh for each of 2"),
        (lambda d: d["programs"][0].update(kind="sideways"), r"`programs\[0\].kind`"),
        (lambda d: d["programs"][1].pop("tensors"), r"`programs\[1\].tensors` is mis"),
        (lambda d: d["transfers"][0].update(source=7), r"`transfers\[0\].source` must"),
        (lambda d: d.update(num_stages=4), "has the programs"),
    ],
)
def test_an_edited_plan_that_makes_no_sense_is_refused(
    tmp_path: Path, change: Any, message: str
):
    path = tmp_path / "plan.json"
    planned(2).save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=message):
        parallelize(step, plan=Plan.load(path)).plan(*abstract())


def test_a_plan_brings_its_method():
    method = PipelineParallel(num_stages=2, num_microbatches=2)
    plan = planned(2)
    for other in (ShardParallel(), replace(method, num_stages=4)):
        with pytest.raises(ValueError, match="leave the method out"):
            parallelize(step, plan=plan, method=other)
    whole = parallelize(step).plan(*abstract())
    with pytest.raises(ValueError, match="`plan` is of one program"):
        parallelize(step, plan=whole, method=method)
    with pytest.raises(TypeError, match=r"use plan\.stages\.programs"):
        assert plan.sharding
    with pytest.raises(TypeError, match=r"use plan\.sharding"):
        assert whole.stages


def test_a_pin_that_matches_nothing_is_refused():
    method = PipelineParallel(num_stages=2, num_microbatches=2)
    function: Any = parallelize(step, method=method, pins={"parms": P("x")})
    with pytest.raises(ValueError, match="'parms' is in none"):
        function.plan(*abstract())
