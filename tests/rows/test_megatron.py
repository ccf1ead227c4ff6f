"""Rows of Megatron-LM: column and row splits of a layer, and of the vocabulary."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import (
    BSH_BYTES,
    HEADS,
    MLP,
    NUM_TOKENS,
    VOCAB,
    WIDTH,
    Case,
    encoder,
    f3,
    f3_forward,
    language_model,
    token_losses,
)
from tests.rows.named_plans import plan_of_layout
from tests.rows.running import (
    all_reduce_bytes,
    homes,
    run_as_planned,
    run_pipeline_as_planned,
    sent_bytes,
    traffic,
)

HEADS_AND_MLP = {HEADS: "model", MLP: "model"}
WORDS = {VOCAB: "model"}


def four_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("model",))


def run_named(case: Case, layout: dict[int, str]) -> Plan:
    """The plan that a layout names, which runs as planned."""
    plan = plan_of_layout(case, four_devices(), layout)
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)
    return plan


def run_solved(case: Case) -> Plan:
    """The plan that the solver finds, which runs as planned."""
    step = autopar.parallelize(case.step, mesh=four_devices())
    return run_as_planned(step, *case.args).plan


def test_meg_1_forward_takes_two_all_reduces() -> None:
    plan = run_named(f3_forward(), HEADS_AND_MLP)
    assert BSH_BYTES == 65_536
    assert traffic(plan) == {("all_reduce", "model"): [65_536] * 2}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_meg_1_forward_and_backward_take_four_all_reduces(fused: bool) -> None:
    """With separate q, k and v, too: their three input gradients are added first."""
    plan = run_named(f3(fused=fused), HEADS_AND_MLP)
    assert traffic(plan) == {("all_reduce", "model"): [65_536] * 4}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_meg_1_the_solver_splits_kernels_so_and_norms_over_the_sequence(
    fused: bool,
) -> None:
    """It cuts each all_reduce in two, and norms and residuals into four (MEG-3): the
    same 8 bsh (t-1)/t elements are sent, and the work in between is not repeated."""
    case = f3(fused=fused)
    plan, named = run_solved(case), plan_of_layout(case, four_devices(), HEADS_AND_MLP)
    columns = {"qkv": (2,)} if fused else {"q": (1,), "k": (1,), "v": (1,)}
    kernels = columns | {"out": (0,), "up": (1,), "down": (0,)}
    found = homes(plan)
    assert {name: found[f"params['{name}']"] for name in kernels} == kernels
    assert traffic(plan) == {
        ("all_gather", "model"): [65_536] * 4,
        ("reduce_scatter", "model"): [16_384] * 4,
        ("all_reduce", "model"): [512, 512],  # gradients of the norms' scales
    }
    assert sent_bytes(named) == 8 * (BSH_BYTES // 4) * 4 * 3 / 4 == 393_216
    assert sent_bytes(plan) == sent_bytes(named) + 2 * all_reduce_bytes(512, 4)
    assert plan.predicted.step_seconds < named.predicted.step_seconds


def test_meg_3_the_sequence_is_split_where_the_heads_are_not() -> None:
    """As many bytes on a ring as whole activations take, which are not held."""
    case, plans, temp_bytes = f3(), [], []
    for sequence in (False, True):
        method = autopar.Megatron(tensor=4, sequence=sequence)
        step = autopar.parallelize(case.step, mesh=four_devices(), method=method)
        compiled = run_as_planned(step, *case.args)
        plans.append(compiled.plan)
        memory = compiled.lowered.program.compile().memory_analysis()
        assert memory is not None
        temp_bytes.append(memory.temp_size_in_bytes)
    whole, split = plans
    assert traffic(whole) == {("all_reduce", "model"): [65_536] * 4}
    assert traffic(split) == {
        ("all_gather", "model"): [65_536] * 4,
        ("reduce_scatter", "model"): [16_384] * 4,
        ("all_reduce", "model"): [512, 512],  # gradients of the norms' scales
    }
    assert sent_bytes(split) == sent_bytes(whole) + all_reduce_bytes(1_024, 4)
    assert temp_bytes[1] < temp_bytes[0]


def test_meg_2_vocab_parallel_lookup_is_one_all_reduce_of_the_rows() -> None:
    def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    params, tokens, _ = language_model().args
    plan = run_named(Case(lookup, (params["table"], tokens)), WORDS)
    assert traffic(plan) == {("all_reduce", "model"): [NUM_TOKENS * WIDTH * 4]}


def test_meg_2_vocab_parallel_cross_entropy_is_three_scalars_a_token() -> None:
    """Maximum, sum of exponentials, picked logit; the rest is the lookup."""
    case = Case(token_losses, language_model().args)
    plan = run_named(case, WORDS)
    lookup, *scalars = traffic(plan)["all_reduce", "model"]
    assert lookup == NUM_TOKENS * WIDTH * 4 == 8_192
    assert scalars == [NUM_TOKENS * 4] * 3 == [128, 128, 128]


def test_meg_2_the_mean_of_the_losses_reduces_the_third_scalar_late() -> None:
    """The picked logits stay partial sums until they are one number. The backward pass
    adds the input gradient of the head, and nothing for the table."""
    plan = run_named(language_model(), WORDS)
    assert traffic(plan) == {("all_reduce", "model"): [8_192, 8_192, 128, 128, 4]}


def test_meg_2_the_solver_gathers_no_logits() -> None:
    case = language_model()
    plan, named = run_solved(case), plan_of_layout(case, four_devices(), WORDS)
    largest = max(max(sizes) for sizes in traffic(plan).values())
    assert largest == NUM_TOKENS * WIDTH * 4 < NUM_TOKENS * VOCAB * 4
    assert plan.predicted.step_seconds < named.predicted.step_seconds
    assert sent_bytes(plan) < sent_bytes(named)


def test_meg_6_stages_rows_and_columns_compose() -> None:
    """2 x 2 x 2: two stages of two rows of devices that split the batch, and in each
    row two neighbours that split heads and the MLP; b s h bytes a border."""
    case = encoder(2)
    pins = {}
    for i in range(2):
        layer = f"layers[{i}]"
        pins |= {
            f"{layer}['qkv']": P(None, None, "tensor"),
            f"{layer}['out']": P("tensor"),
            f"{layer}['up']": P(None, "tensor"),
            f"{layer}['down']": P("tensor"),
        }
    pins |= {"x": P("data"), "y": P("data")}
    step = autopar.parallelize(
        case.step,
        method=autopar.PipelineParallel(2, 1),
        mesh="data:2;tensor:2",
        pins=pins,
    )
    plan = run_pipeline_as_planned(step, *case.args).plan
    groups = {
        group
        for each in plan.stages.programs
        for collective in each.sharding.collectives
        if collective.bytes >= BSH_BYTES // 4
        for group in collective.groups
    }
    assert {(0, 1), (2, 3)} <= groups  # neighbours
    sent = {(t.source, t.target): t.total_bytes for t in plan.stages.transfers}
    assert sent == {(0, 1): BSH_BYTES, (1, 0): BSH_BYTES}
