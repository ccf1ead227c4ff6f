"""What a plan answers first: does it fit, is it quick, what could be better."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.audit.audit import Audit
from autopar.audit.replay import Replay
from autopar.lowering.memory_use import MemoryUse
from autopar.plans.plan import TriedPlan
from autopar.plans.plan_view import PlanView
from autopar.report.answers import Answers, _rounded
from autopar.report.compiled_figures import CompiledFigures
from autopar.steps.parallel_plan import Plan
from tests.tiny_plans import make_plan

BATCH, LENGTH, WIDTH, LAYERS, WORDS = 32, 64, 256, 2, 512
H100S = autopar.Cluster.preset("8xH100")
METHOD = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
Tree = Any


def train_step(state: Tree, batch: Tree) -> Any:
    """A language model of residual layers, with Adam's two moments."""

    def loss_of(params: Tree) -> jax.Array:
        x = params["embedding"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        logits = x @ params["embedding"].T
        picked = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, state["square"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-6),
        *(state["params"], mean, square),
    )
    return {"params": params, "mean": mean, "square": square}, loss


def types(num_layers: int = LAYERS) -> tuple[Tree, Tree]:
    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": numbers(WIDTH, 4 * WIDTH), "down": numbers(4 * WIDTH, WIDTH)}
    params = {"embedding": numbers(WORDS, WIDTH), "layers": [layer] * num_layers}
    whole = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    state = {name: params for name in ("params", "mean", "square")}
    return state, {"tokens": whole, "labels": whole}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.parallelize(train_step, cluster=H100S, mesh="x:8").plan(*types())


@pytest.fixture(scope="module")
def remade() -> Plan:
    options = {"cluster": H100S, "mesh": "x:8", "remat": "full"}
    return autopar.parallelize(train_step, **options).plan(*types())


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    return autopar.parallelize(train_step, method=METHOD).plan(*types())


def test_examples_and_tokens_a_second_are_those_of_the_batch(
    plan: Plan, pipeline: Plan
) -> None:
    for each in (plan, pipeline):
        found = each.answers
        assert (found.examples, found.tokens) == (BATCH, BATCH * LENGTH)
        assert found.seconds == each.predicted.step_seconds
        assert " examples/s, " in found.speed and " tokens/s" in found.speed


def test_mfu_counts_the_products_of_the_model_once(plan: Plan, remade: Plan) -> None:
    # Each of the layers' products, and that with the embedding, is done thrice.
    products = LAYERS * 2 * WIDTH * 4 * WIDTH + WIDTH * WORDS
    flops = 3 * 2 * BATCH * LENGTH * products
    for each in (plan, remade):
        found = each.answers
        assert found.utilization is not None
        share = flops / (8 * H100S.device.peak_flops["float32"] * found.seconds)
        assert found.utilization == pytest.approx(share, rel=1e-6)
    assert remade.sharding.remat


def test_memory_by_kind_and_by_line_adds_up_to_the_peak(
    plan: Plan, remade: Plan, pipeline: Plan
) -> None:
    for each in (plan, remade, pipeline):
        memory = each.answers.memory
        assert memory is not None
        for parts in (memory.kinds, memory.lines):
            assert sum(part for _, part in parts) == each.predicted.peak_bytes
            assert all(part >= 0 for _, part in parts)
    memory = plan.answers.memory
    assert memory is not None
    kinds = dict(memory.kinds)
    given = {i.path: i.bytes for i in plan.sharding.inputs}
    params = sum(b for path, b in given.items() if "'params'" in path)
    assert kinds["parameters"] == params
    assert kinds["optimizer state"] == plan.sharding.state_bytes() - params
    assert kinds["activations"] > 0
    assert any("test_answers.py" in line for line, _ in memory.lines)
    less = dict(remade.answers.memory.kinds) if remade.answers.memory else {}
    assert less["activations"] < kinds["activations"]


def test_a_pipeline_has_its_stages_memory_by_kind(pipeline: Plan) -> None:
    memory = pipeline.answers.memory
    assert memory is not None
    kinds = dict(memory.kinds)
    assert {"parameters", "optimizer state", "activations", "gradients"} <= set(kinds)


def test_answers_come_first(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    lines = str(plan).splitlines()
    names = [line.split("  ")[0] for line in lines if not line.startswith(" ")]
    assert names[1:5] == ["fits", "speed", "holds", "by line"]
    assert repr(plan).splitlines()[1] == lines[1]
    plan.explain()
    assert lines[1] in capsys.readouterr().out
    assert "<pre>plan of train_step" in plan._repr_html_()


def answers(tried: list[TriedPlan] | None = None, **changes: Any) -> Answers:
    """Of a plan of 5 us and 2,048 B."""
    made = make_plan()
    made = replace(made, predicted=replace(made.predicted, **changes))
    return Answers(PlanView(made), None, None, "", tuple(tried or ()))


def other(title: str, seconds: float, peak_bytes: int) -> TriedPlan:
    predicted = make_plan().predicted
    predicted = replace(predicted, step_seconds=seconds, peak_bytes=peak_bytes)
    return TriedPlan(title, predicted)


@pytest.mark.parametrize(
    ("tried", "budget", "advice"),
    [
        (
            [other("Zero(3)", 5.45e-6, 1024), other("slow", 9e-6, 16)],
            0,
            "Zero(3) would save 1.0 KiB a device for 9.0% more time.",
        ),
        (
            [other("ShardParallel()", 2.5e-6, 2048), other("Zero(3)", 5e-6, 1024)],
            4096,
            "ShardParallel() would be 2x quicker.",
        ),
        ([other("large", 1e-6, 8192), other("slow", 9e-6, 16)], 4096, "keep it: of 2 "),
        (
            [other("slower", 9e-6, 512), other("slow", 6e-6, 1024)],
            1024,
            "slow would fit: it needs 1.0 KiB for 20.0% more time.",
        ),
    ],
)
def test_advice_is_of_plans_that_were_made_at_their_price(
    tried: list[TriedPlan], budget: int, advice: str
) -> None:
    found = answers(tried, budget_bytes=budget)
    assert found.advice.startswith(advice)
    assert ("advice", found.advice) in list(found.rows)
    assert "advice" not in dict(answers().rows)


@pytest.mark.slow
def test_a_search_of_remat_leaves_advice() -> None:
    options = {"cluster": H100S, "mesh": "x:8", "remat": "auto"}
    free = autopar.parallelize(train_step, cluster=H100S, mesh="x:8").plan(*types(1))
    budget = free.predicted.peak_bytes - 1000
    step = autopar.parallelize(train_step, memory_budget=budget, **options)
    plan = step.plan(*types(1))
    assert any(each.title.startswith('remat="') for each in plan.tried)
    mine = plan.predicted
    assert all(each.predicted != mine for each in plan.tried)
    assert plan.answers.advice


def test_a_search_of_meshes_leaves_the_others() -> None:
    plan = autopar.parallelize(train_step, cluster=H100S).plan(*types(1))
    own = f'mesh="{plan.sharding.mesh}"'
    assert all(each.title.startswith('mesh="') for each in plan.tried)
    assert own not in [each.title for each in plan.tried]
    again = Plan(plan.decision)
    assert again == plan and not again.tried


def compiled(peak: int, capacity: int, replayed: Replay | None) -> CompiledFigures:
    audit = Audit((), (), MemoryUse(peak, 0, 0, 0))
    return CompiledFigures("1x8xH100", (("", audit),), 1.0, capacity, replayed)


def test_what_was_compiled_comes_before_what_is_modelled() -> None:
    gib = 1 << 30
    assert answers(budget_bytes=4096).fits == (
        "yes: 2.0 KiB of 4.0 KiB a device (50%), modelled"
    )
    assert answers(budget_bytes=1024).fits.startswith("no: ")
    assert answers().fits.startswith("not known: ")
    figures = compiled(60 * gib, 80 * gib, Replay(2.0, 0.5, {}))
    found = replace(answers(), compiled=figures)
    assert found.fits == (
        "yes: 60.0 GiB of 80.0 GiB a device (75%), compiled for 1x8xH100"
    )
    assert found.speed.startswith("2 s a step, ")
    assert found.speed.endswith("25.0% is exposed communication")
    over = replace(found, compiled=compiled(90 * gib, 80 * gib, None))
    assert over.fits.startswith("no: 90.0 GiB of 80.0 GiB a device (112%)")
    assert over.seconds == 5e-6


@pytest.mark.parametrize(("name", "is_told"), [("1x8xH100", True), ("v5e:2x4", False)])
def test_more_than_jax_takes_of_a_gpu_names_the_variable(
    name: str, is_told: bool
) -> None:
    cluster = autopar.Cluster.preset(name)
    memory = cluster.device.memory_bytes
    for peak, is_more in ((memory * 4 // 5, True), (memory // 2, False)):
        held = compiled(peak, memory, None)
        found = replace(answers(), cluster=cluster, compiled=held).fits
        said = found.endswith(", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92")
        assert said == (is_told and is_more), found


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.4, "999"), (999.6, "1k"), (999_700.0, "1M"), (2.5e9, "2.5G")],
)
def test_numbers_are_rounded_up_to_the_next_unit(value: float, text: str) -> None:
    assert _rounded(value) == text
