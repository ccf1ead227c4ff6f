"""Published runs: what is simulated of them, and how near predictions are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from benchmarks.models import names
from benchmarks.published.machines import link_of, machine_of, table_of
from benchmarks.published.pipeline import StageSeconds, balanced_bounds
from benchmarks.published.published_plan import parse_layouts
from benchmarks.published.runs import (
    Run,
    constant_error,
    error_of,
    model_of,
    read_runs,
)
from benchmarks.published.seconds import (
    BACKWARD,
    FORWARD,
    ONCE,
    RECOMPUTE,
    System,
    exposed,
    unit_seconds,
)
from benchmarks.published.simulator import Outcome, Plan, Simulator
from benchmarks.published.systems import candidates, system_of
from benchmarks.published.table import read_rows
from benchmarks.published.work import Execution, Layout, Transformer
from benchmarks.suites import TABLES
from tests.marks import slow

GPT, MOE = TABLES / "alpa_osdi22_gpt.csv", TABLES / "alpa_osdi22_moe.csv"
RESNET = TABLES / "held_out" / "alpa_osdi22_wide_resnet.csv"
ONE = Layout(1, 1, 1, 1)


def runs_of(table: str, *parts: str) -> list[Run]:
    """Those whose model, machine and configuration have all these parts."""
    found = read_runs(TABLES / f"{table}.csv")
    return [
        run for run in found if {*parts} <= {run.kind, *run.group, *run.config.values()}
    ]


@pytest.mark.parametrize(
    ("text", "layouts"),
    [
        ("1x(1;1)", [(1, 1, 1, 1)]),
        ("2x(1;4) logical (4;1)", [(1, 4, 4, 1)] * 2),
        (
            "2+2+4 GPUs logical (2;1)(2;1)(4;1)",
            [(1, 2, 2, 1), (1, 2, 2, 1), (1, 4, 4, 1)],
        ),
        (
            "2x(1;4)+(1;8) logical (4;1)(1;4)(1;8)",
            [(1, 4, 4, 1), (1, 4, 1, 4), (1, 8, 1, 8)],
        ),
        ("4+(1;8)", [(1, 4, 1, 4), (1, 8, 1, 8)]),
    ],
)
def test_plans_are_read(text: str, layouts: Sequence[tuple[int, ...]]) -> None:
    assert parse_layouts(text, 8) == tuple(Layout(*each) for each in layouts)


def test_a_shape_that_is_not_its_submesh_is_refused() -> None:
    with pytest.raises(ValueError, match="a logical shape has"):
        parse_layouts("2x(1;8) logical (2;2)", 8)


@pytest.mark.parametrize("path", [GPT, MOE, RESNET], ids=["gpt", "moe", "wide-resnet"])
def test_sizes_are_the_published_ones(path: Path) -> None:
    """The head's matrix is that of the embedding."""
    lines = [each for each in path.read_text().splitlines() if each[0] != "#"]
    column = lines[0].split(",").index("params_billion")
    for row, line in zip(read_rows(path), lines[1:], strict=True):
        units = row.model.units(ONE, 1, Execution())
        counted = row.model.sequence[:-1] if path != RESNET else row.model.sequence
        total = sum(units[unit].params + units[unit].experts for unit in counted)
        published = float(line.split(",")[column]) * 1e9
        assert total == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("8B", 8.03), ("LLAMA3_70B", 70.6), ("405B", 406), ("GPT OSS 120B", 116.8)],
)
def test_models_by_name_have_their_size(name: str, billions: float) -> None:
    model = model_of(name, 8192)
    assert model is not None
    units = model.units(ONE, 1, Execution())
    total = sum(units[unit].params + units[unit].experts for unit in model.sequence)
    assert total == pytest.approx(billions * 1e9, rel=0.01)


def llama() -> Transformer:
    return Transformer(4, 1024, 16, 4096, 32000, 8192, kv_heads=4, is_gated=True)


def test_a_fused_attention_holds_no_matrix_of_scores() -> None:
    """And a causal mask halves its flops."""
    unfused, fused = (
        llama().units(ONE, 1, Execution(fuses_attention=is_fused))[1]
        for is_fused in (False, True)
    )
    scores = 16 * 8192**2 * 2
    assert unfused.kept_bytes - fused.kept_bytes == pytest.approx(2 * scores)
    assert fused.attention is not None
    assert 2 * fused.attention.flops == 4 * 1024 * 8192**2


def seconds_of(system: System, layout: Layout, unit: int = 1) -> np.ndarray:
    """[waited and ahead, phases] of a unit of a small decoder on H100s."""
    cluster = replace(
        Cluster.preset("8xH100"), num_hosts=1, devices_per_host=layout.size
    )
    found = llama().units(layout, layout.data, system.how)[unit]
    return np.array(unit_seconds(found, layout, cluster, system, "bfloat16"))


def test_all_but_the_last_product_of_a_layer_is_made_again() -> None:
    full = System(how=Execution(fuses_attention=True))
    attention, mlp = (seconds_of(full, ONE, unit)[0] for unit in (1, 2))
    assert attention[RECOMPUTE] == pytest.approx(attention[FORWARD], rel=0.01)
    assert 0.6 < mlp[RECOMPUTE] / mlp[FORWARD] < 0.8  # two matrices of three
    none = seconds_of(replace(full, remat="none"), ONE)[0]
    assert none[RECOMPUTE] == 0 and none[FORWARD] == attention[FORWARD]


def test_gathered_parameters_run_ahead_of_compute() -> None:
    """Two gathers and a reduction of each microbatch; else once a step."""
    layout = Layout(1, 8, 8, 1)
    each = seconds_of(System(gathers=True), layout)[1]
    once = seconds_of(System(), layout)[1]
    assert each[FORWARD] > 0 and each[BACKWARD] > each[FORWARD] and each[ONCE] == 0
    assert once[FORWARD] == once[BACKWARD] == 0 and once[ONCE] > 0
    cluster = Cluster.preset("8xH100")
    assert exposed(1.0, 5.0, cluster) == cluster.visible_fraction
    assert exposed(6.0, 5.0, cluster) == 3.0 and exposed(20.0, 5.0, cluster) == 15.0


def test_a_tensor_group_waits_for_what_it_gathers_unless_products_are_cut() -> None:
    layout = Layout(1, 8, 1, 8)
    system = system_of("torchtitan", remat="none")
    waited, ahead = seconds_of(system, layout)
    cut, beside = seconds_of(replace(system, decomposes=("forward",)), layout)
    assert cut[FORWARD] < waited[FORWARD] and cut[BACKWARD] == waited[BACKWARD]
    assert beside[FORWARD] > ahead[FORWARD]


def stages(
    forward: Sequence[float], sent: float = 0.0, number: int = 0
) -> StageSeconds:
    """Backward takes twice as long as forward."""
    ones = np.array(forward, float)
    border = np.array([sent] * (len(ones) - 1) + [0.0])
    return StageSeconds(number or len(ones), ones, 2 * ones, border, 0 * ones)


@pytest.mark.parametrize("sent", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("forward", [(1, 1, 1, 1), (1, 2, 1), (1.5, 1, 1, 1, 0.5)])
@pytest.mark.parametrize("microbatches", [8, slow(32)])
def test_the_formula_is_near_the_schedule(
    forward: Sequence[float], sent: float, microbatches: int
) -> None:
    found = stages(forward, sent)
    exact = found._simulated(microbatches)
    bound = found.bound(microbatches)
    assert 0.99 * exact <= bound <= exact * (1.02 + 1.2 / microbatches)
    assert found.makespan(microbatches) == pytest.approx(exact, rel=0.01)


def test_bubbles_shrink_as_published() -> None:
    """Narayanan et al. 2021, section 2.2."""
    plain, interleaved = stages([1] * 4), stages([0.5] * 8, number=4)
    assert plain.makespan(16) - 48 == pytest.approx(9)
    assert interleaved.makespan(16) - 48 == pytest.approx(4.5)
    assert interleaved.bound(16) == pytest.approx(interleaved.makespan(16), rel=0.1)
    assert plain.in_flight(32).tolist() == [4, 3, 2, 1]
    assert interleaved.in_flight(32)[0] * 0.5 * 2 > 4


def test_stages_are_dealt_out_so_that_the_slowest_is_fast() -> None:
    busy = np.array([1.0, 2, 2, 2, 1, 4])
    held = [np.ones(6)] * 3
    bounds = balanced_bounds([busy, busy, busy / 2], held, 6.0)
    assert bounds is not None
    sums = [busy[a:b].sum() for a, b in zip(bounds, bounds[1:], strict=False)]
    assert max(*sums[:2], sums[2] / 2) <= 5
    assert balanced_bounds([busy] * 3, held, 1.5) is None


def test_a_ring_has_the_lanes_of_its_group() -> None:
    """Of two neighbours one, of four four, of eight all six; of 0 and 4 two, 2 and 6
    one: the slowest ring counts. Other hosts join all their devices alike."""
    table = np.array(table_of("machines")["V100"]["lanes"])
    assert (table == table.T).all() and (table.sum(axis=1) == 6).all()
    for shape, lanes in {(2, 1): 1, (4, 1): 4, (8, 1): 6, (2, 4): 1}.items():
        layout = Layout(1, shape[0] * shape[1], *shape)
        cluster = replace(Cluster.preset("V100"), devices_per_host=layout.size)
        found = link_of(cluster, layout.mesh, ("outer", "inner"))
        line = cluster.host_link.seconds_per_byte
        assert found.seconds_per_byte == pytest.approx(line * 6 / lanes)
    layout, cluster = Layout(1, 4, 4, 1), Cluster.preset("4xA100")
    assert link_of(cluster, layout.mesh, ("inner",)) == cluster.link(
        layout.mesh, ("inner",)
    )


def test_a_slice_of_tpus_gathers_along_both_axes() -> None:
    machine = machine_of("TPU v5e", 512)
    assert machine is not None
    layout = Layout(2, 256, 512, 1, inner=256)
    within, between = (
        link_of(machine.of(layout), layout.mesh, (axis,)) for axis in ("inner", "outer")
    )
    amount = 2.0**30
    quick, slow = (
        collective_seconds("all_gather", amount, link) for link in (within, between)
    )
    assert quick < amount / 150e9 and slow > 10 * quick


def test_what_does_not_fit_is_out_of_memory() -> None:
    row = read_rows(GPT)[-1]
    data_parallel, *_ = candidates("intra_only", row)
    found = row.simulator.run(replace(data_parallel, num_microbatches=1))
    assert data_parallel.layouts[0].tensor == 1
    assert found is None or not found.is_feasible
    (run,) = [
        run
        for run in read_runs(TABLES / "held_out" / "alpa_osdi22_moe_large.csv")
        if run.kind == "deepspeed" and run.published is None
    ]
    assert run.predicted is None and run.error == 0


def peak_of(outcome: Outcome | None) -> float:
    assert outcome is not None
    return outcome.peak_bytes


def test_each_split_of_the_state_holds_less() -> None:
    machine = machine_of("H100", 8)
    assert machine is not None
    simulator = Simulator(llama(), 64, machine)
    layout = Layout(1, 8, 8, 1)
    peaks = [
        peak_of(simulator.run(Plan((layout,), 8, system)))
        for system in (
            System(splits_state=False),
            System(),
            System(reduces_always=True),
            System(gathers=True),
        )
    ]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == 4


@pytest.mark.slow
def test_a_system_that_routes_all_tokens_at_once_takes_the_most_that_fit() -> None:
    """DeepSpeed on one and two GPUs: eight sequences each, as Alpa's authors ran it."""
    for number in ("1", "2"):
        (run,) = runs_of("alpa_osdi22_moe", number, "deepspeed")
        assert run.outcome is not None
        assert run.outcome.plan.num_microbatches == 1024 // (8 * int(number))


def test_deepspeed_tries_every_number_of_devices_that_share_experts() -> None:
    layouts = [plan.layouts[0] for plan in candidates("deepspeed", read_rows(MOE)[3])]
    assert list(dict.fromkeys(each.inner for each in layouts)) == [2, 4, 0]
    assert {(each.data, each.tensor) for each in layouts} == {(8, 1)}


def test_what_the_axes_of_a_wide_resnet_split_is_searched() -> None:
    """The first stages split the batch, those behind layers too; GPTs' are as given."""
    row = read_rows(RESNET)[4]
    plans = candidates("alpa", row)
    shapes = {tuple(each.tensor for each in plan.layouts) for plan in plans}
    assert {(1, 1, 1), (1, 4, 4), (1, 1, 8), (4, 4, 8)} <= shapes
    assert len(candidates("alpa", read_rows(GPT)[3])) == 1


def test_every_published_size_of_a_wide_resnet_has_a_name() -> None:
    sizes = ("250m", "500m", "1b", "2b", "4b", "6.8b", "13b")
    assert {f"wide-resnet-{size}" for size in sizes} <= set(names())


def test_errors_are_beside_those_of_the_best_constant() -> None:
    run = runs_of("torchtitan_llama")[0]
    runs = [replace(run, published=value) for value in (1.0, 2.0, 4.0)]
    for each in runs:
        vars(each)["predicted"] = 2.0
    numbers = np.array([1.0, 2.0, 4.0])
    guesses = [abs(guess / numbers - 1).mean() for guess in np.arange(1, 4, 0.1)]
    assert constant_error(runs) == pytest.approx(min(guesses))
    assert error_of(runs) == pytest.approx((1 + 0 + 0.5) / 3)


def test_what_no_compiler_made_is_told_and_not_scored() -> None:
    assert {run.reason for run in runs_of("torchtitan_llama", "no", "yes")} == {""}
    reasons = {run.reason for run in runs_of("megatron_bridge_nemo", "H100")}
    assert reasons == {"not compiled", "SFT", "LoRA"}
    eager = [run for run in runs_of("torchtitan_llama") if run.reason]
    assert {run.config["compile"] for run in eager} == {"no"}


def test_one_configuration_of_several_releases_is_one_run() -> None:
    """H100s, 1,280 sequences: five releases; the median of their numbers."""
    (run,) = runs_of("megatron_bridge_nemo", "GPT OSS 120B", "H100", "1280")
    assert (run.release, run.published) == ("26.02", 5904.0)


@pytest.mark.parametrize(
    ("table", "kind", "most"),
    [
        ("torchtitan_llama", "H100-96GB-HBM2e bf16", 0.15),
        ("maxtext_tpu_a3", "TPU v5e", 0.15),
        ("maxtext_tpu_a3", "A3 H100-80GB", 0.15),
        ("alpa_osdi22_moe", "alpa", 0.15),
    ],
)
def test_runs_are_predicted_near_what_was_published(
    table: str, kind: str, most: float
) -> None:
    """And all are predicted to fit. Nothing was fitted on them."""
    runs = [run for run in runs_of(table, kind) if not run.reason]
    assert all(run.predicted for run in runs)
    assert error_of(runs) <= most


def test_megatron_on_a100s_is_predicted() -> None:
    runs = read_runs(TABLES / "held_out" / "megatron_sc21.csv")[:2]
    assert error_of(runs) <= 0.15
