"""Row GPI-3 of GPipe: a cell keeps its inputs; its backward makes the rest again."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.methods.methods import PipelineParallel
from autopar.steps.execution import held_by_submesh
from tests.rows.fixtures import Case, Params, f6, random
from tests.rows.running import run_pipeline_as_planned

LEVELS = (None, "selective", "cheap", "full")


def working_bytes(case: Case, num_microbatches: int, remat: str | None) -> list[int]:
    """What each one-device cell of GPipe takes at most besides parameters.

    Values that wait for their backward task, gradients, and what the compiler says
    that the running program takes.
    """
    cells = 4 if len(case.args[0]) == 8 else 2
    method = PipelineParallel(
        cells, num_microbatches, "gpipe", stage_meshes=["x:1"] * cells
    )
    step = autopar.parallelize(case.step, method=method, remat=remat)
    lowered: Any = step.lower(*case.args)
    pipeline = lowered.step.pipeline
    planned = pipeline.planned
    temp = {
        (each.planned.stage, each.planned.cut.kind): each.program.compile()
        .memory_analysis()
        .temp_size_in_bytes
        for each in pipeline.lowered
        if each.planned.cut.kind != "apply"
    }
    return [
        max(
            temp[cell, each.task.kind]
            + sum(
                count * planned.slot_bytes(slot, cell)
                for slot, count in each.counts.items()
                if planned.flow.slots[slot].kind in ("activation", "gradient")
            )
            for each in tasks
            if each.task.kind != "apply"
        )
        for cell, tasks in enumerate(held_by_submesh(planned))
    ]


def test_gpi_3_f6_takes_less_than_a_scan_over_ticks_with_remat() -> None:
    """The row's numbers are of one program on all devices, which keeps a cell's values
    for each of 11 ticks; here they are kept for 8 microbatches."""
    without, with_remat = (working_bytes(f6(), 8, each) for each in (None, "full"))
    assert max(without) <= 132_600
    assert max(with_remat) <= 73_176
    # Of four values of 1,024 B in two layers, a microbatch keeps the input alone.
    saved = [a - b for a, b in zip(without, with_remat, strict=True)]
    assert min(saved) >= 8 * 3 * 1_024


def deep(rows: int, width: int) -> Case:
    """F6's step with four layers, for two cells of two, of much more rows."""
    layers = [random(i, width, width, scale=0.2) for i in range(4)]
    return Case(f6().step, (layers, random(8, rows, width), random(9, rows, width)))


def test_gpi_3_activations_are_those_of_all_inputs_and_one_microbatch() -> None:
    """O(N + L/K * N/M), N the bytes of the batch between two cells, L/K = 2 layers."""
    batch_bytes = 1_024 * 16 * 4
    found = {m: working_bytes(deep(1_024, 16), m, "full")[1] for m in (1, 2, 4, 16)}
    model = {m: batch_bytes * (1 + 2 / m) for m in found}
    ratios = np.array([found[m] / model[m] for m in found])
    constant = np.sqrt(ratios.min() * ratios.max())
    assert ratios == pytest.approx(constant, rel=0.25)
    assert constant < 2
    without = working_bytes(deep(1_024, 16), 16, None)[1]
    assert without > 2.5 * found[16]


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("gpipe", "full"),
        ("gpipe", "cheap"),
        ("1f1b", "full:1"),
        ("zb_h1", "full"),
        ("zb_h2", "cheap"),
    ],
)
def test_gpi_3_every_schedule_recomputes(schedule: str, remat: str) -> None:
    case = deep(8, 16)
    method = PipelineParallel(2, 4, schedule)
    step = autopar.parallelize(case.step, method=method, remat=remat)
    plan = run_pipeline_as_planned(step, *case.args).plan
    backward = [p.sharding for p in plan.stages.programs if p.kind == "backward"]
    assert [each.remat for each in backward] == [remat] * 2
    again = ["tanh" in {op.kind for op in each.operators} for each in backward]
    assert again == [True, ":" not in remat]


def test_gpi_3_stages_that_share_a_submesh_recompute() -> None:
    case = f6()
    method = PipelineParallel(4, 4, "interleaved", stages_per_submesh=2)
    step = autopar.parallelize(case.step, method=method, remat="full")
    run_pipeline_as_planned(step, *case.args)


def attention(is_scanned: bool) -> Case:
    """Four layers of attention, as a loop or written out."""

    def layer(x: jax.Array, params: Params) -> jax.Array:
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bse,bte->bst", q, k))
        return x + jnp.tanh(jnp.einsum("bst,bte->bse", weights, v) @ params["out"])

    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            if is_scanned:
                y, _ = jax.lax.scan(lambda y, p: (layer(y, p), None), x, params)
            else:
                y = x
                for i in range(4):
                    y = layer(y, {name: leaf[i] for name, leaf in params.items()})
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {
        "qkv": random(0, 4, 16, 48, scale=0.2),
        "out": random(1, 4, 16, 16, scale=0.2),
    }
    return Case(step, (params, random(2, 4, 32, 16)))


@pytest.mark.parametrize("is_scanned", [True, False])
def test_gpi_3_each_level_keeps_less_than_the_one_before(is_scanned: bool) -> None:
    case, kept = attention(is_scanned), []
    for remat in LEVELS:
        method = PipelineParallel(2, 2, "gpipe", stage_meshes=["x:1", "x:1"])
        step = autopar.parallelize(case.step, method=method, remat=remat)
        lowered: Any = step.lower(*case.args)
        planned = lowered.step.pipeline.planned
        (forward,) = (
            p for p in planned.programs if (p.stage, p.cut.kind) == (1, "forward")
        )
        slots = [s for s in forward.outputs if planned.flow.slots[s].kind != "gradient"]
        kept.append(sum(planned.slot_bytes(slot, 1) for slot in slots))
    none, selective, cheap, full = kept
    assert full < cheap <= none and selective < none and full < selective


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_gpi_3_loops_over_layers_recompute(remat: str) -> None:
    """Selective does again what each iteration kept, full the loop of a stage."""
    case = attention(is_scanned=True)
    method = PipelineParallel(2, 2, stage_meshes=["x:2", "x:1"])
    step = autopar.parallelize(case.step, method=method, remat=remat)
    run_pipeline_as_planned(step, *case.args)


def test_gpi_3_a_plan_file_says_what_is_made_again(tmp_path: Path) -> None:
    case = deep(8, 16)
    method = PipelineParallel(2, 2, "gpipe")
    step = autopar.parallelize(case.step, method=method, remat="full")
    path = tmp_path / "plan.json"
    step.plan(*case.args).save(path)
    again = autopar.parallelize(case.step, plan=autopar.Plan.load(path))
    plan = run_pipeline_as_planned(again, *case.args).plan
    assert plan.explain() == step.plan(*case.args).explain()


def test_gpi_3_levels_are_chosen_with_the_number_of_stages() -> None:
    case = f6()
    method = PipelineParallel(None, 4, "gpipe")
    full = autopar.parallelize(case.step, method=method, remat="full")
    budget = full.plan(*case.args).predicted.peak_bytes
    step = autopar.parallelize(
        case.step, method=method, remat="auto", memory_budget=budget
    )
    plan = run_pipeline_as_planned(step, *case.args).plan
    assert plan.stages is not None and plan.stages.num_stages > 1
    assert plan.predicted.peak_bytes <= budget
    assert {each.sharding.remat for each in plan.stages.programs} > {""}
