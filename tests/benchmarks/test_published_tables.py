"""Published tables: what is read, how it is priced, how near predictions are."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.planner.plan_price import plan_seconds
from benchmarks.models import gpt, moe
from benchmarks.published import unit_costs
from benchmarks.published.constants import FILE, NETWORK_EFFICIENCY, Constants
from benchmarks.published.fit import NAMES, START
from benchmarks.published.layout_restriction import layout_restriction
from benchmarks.published.pipeline_time import Simulator, cluster_of
from benchmarks.published.prediction import PredictedCell, PredictedTable
from benchmarks.published.published_plan import parse_layouts
from benchmarks.published.simulated_plan import Plan, System
from benchmarks.published.systems import FREE, candidates, predict
from benchmarks.published.table import read_table
from benchmarks.published.unit_costs import Layout, UnitCosts
from benchmarks.published.unit_model import UnitModel, gpt_units, moe_units
from benchmarks.published_tables import fit_and_write

FOLDER = Path(unit_costs.__file__).parent
GPT, MOE = FOLDER / "alpa_osdi22_gpt.csv", FOLDER / "alpa_osdi22_moe.csv"


def tiny_gpt(**options: int) -> UnitModel:
    config = replace(gpt.Config.tiny(), num_layers=4, hidden=64, **options)
    return gpt_units(config)


@pytest.mark.parametrize(
    ("text", "layouts"),
    [
        ("1x(1;1)", [(1, 1, 1, 1)]),
        ("2x(1;4) logical (4;1)", [(1, 4, 4, 1)] * 2),
        ("16x(1;4)", [(1, 4, 1, 4)] * 16),
        (
            "2+2+4 GPUs logical (2;1)(2;1)(4;1)",
            [(1, 2, 2, 1), (1, 2, 2, 1), (1, 4, 4, 1)],
        ),
        ("1x(2;8) logical (4;4)", [(2, 8, 4, 4)]),
    ],
)
def test_plans_are_read(text: str, layouts: Sequence[tuple[int, ...]]) -> None:
    assert parse_layouts(text, 8) == tuple(Layout(*each) for each in layouts)


@pytest.mark.parametrize("text", ["4 stages", "2x(1;8) logical (2;2)"])
def test_plans_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a plan is|a logical shape has"):
        parse_layouts(text, 8)


def test_the_head_of_a_file_is_its_setting() -> None:
    setting = read_table(MOE).setting
    assert (setting.vocab_size, setting.mlp_ratio, setting.group_size) == (
        *(32000, 8, 2048),
    )
    assert setting.memory_bytes == 16 * 2**30
    given = read_table(GPT).rows[3].plans["megatron"]
    assert given.layouts == (Layout(1, 1, 1, 1),) * 8
    assert given.num_microbatches == 128


def test_another_table_of_the_same_header_is_read(tmp_path: Path) -> None:
    """Rows of other sizes and GPUs; what ran out of memory or was not measured."""
    lines = GPT.read_text().splitlines()
    head = [line for line in lines if line.startswith(("#", "gpus"))]
    row = "4,12,1024,16,0.2,16,2x(1;2),OOM,12.5*,,30.0,1.7,9"
    path = tmp_path / "other.csv"
    path.write_text("\ufeff" + "\n".join([*head, row, ""]), "utf-8")
    (found,) = read_table(path).rows
    assert [(cell.column, cell.tflops, cell.is_projected) for cell in found.cells] == [
        ("megatron", None, False),
        ("inter_only", 12.5, True),
        ("alpa", 30.0, False),
    ]
    assert found.model.counts == (1, 12, 12, 1)


@pytest.mark.parametrize("path", [GPT, MOE], ids=["gpt", "moe"])
def test_sizes_are_the_published_ones(path: Path) -> None:
    lines = [each for each in path.read_text().splitlines() if each[0] != "#"]
    column = lines[0].split(",").index("params_billion")
    for row, line in zip(read_table(path).rows, lines[1:], strict=True):
        pairs = zip(row.model.num_params, row.model.counts, strict=True)
        total = sum(size * count for size, count in pairs)
        tied = row.model.num_params[0]  # the tables' models share it with the head
        published = float(line.split(",")[column]) * 1e9
        assert total - tied == pytest.approx(published, rel=0.03)


def flops_of(costs: UnitCosts, model: UnitModel, size: int, devices: int) -> np.ndarray:
    """By phase."""
    counts = np.array(model.counts)[costs.unit]
    heavy = np.where(costs.is_heavy, costs.flops[0] + size * costs.flops[1], 0.0)
    return np.bincount(costs.phase, heavy * costs.scale * counts) * devices


def test_the_work_is_that_of_the_formula() -> None:
    """96 B S L H^2 (1 + S / 6H) + 6 B S H V, as the head of the table has it."""
    config = replace(gpt.Config.tiny(), num_layers=4, hidden=128, vocab_size=256)
    model, layout = gpt_units(config), Layout(1, 4, 2, 2)
    costs = unit_costs.unit_costs(model, layout, cluster_of(layout, "V100", START))
    B, S, L, H, V = 16, config.seq_len, 4, 128, 256
    expected = 96 * B * S * L * H**2 * (1 + S / (6 * H)) + 6 * B * S * H * V
    # Recomputation does not repeat the layer's last product, as nothing reads it.
    spared = 2 * B * S * L * 4 * H**2
    found = flops_of(costs, model, B, layout.size)
    assert found.sum() == pytest.approx(expected - spared, rel=1e-6)
    # One product a parameter and token is all that gradients alone wait for.
    weight = 2 * B * S * (12 * L * H**2 + H * V)
    assert found[unit_costs.WEIGHT] == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (tiny_gpt(), Layout(1, 1, 1, 1)),
        (tiny_gpt(), Layout(1, 4, 2, 2)),
        pytest.param(
            moe_units(moe.Config.tiny()), Layout(1, 4, 4, 1), marks=pytest.mark.slow
        ),
    ],
    ids=["one device", "data and tensor", "experts"],
)
def test_units_cost_together_what_the_plan_does(
    model: UnitModel, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the size that was planned: what the planner's own price says of the loop,
    on links that are alike, as it takes them to be."""
    monkeypatch.setattr(unit_costs, "link_of", Cluster.link)
    cluster = cluster_of(layout, "V100", START)
    costs = unit_costs.unit_costs(model, layout, cluster)
    graph = unit_costs.traced_graph(model, 32)
    limits = [layout_restriction(model, graph, layout.mesh)]
    solved = unit_costs.plan_intra_op(
        graph, layout.mesh, cluster, restrictions=limits, gap=1e-3
    )
    whole = plan_seconds(graph, solved.plan, cluster)
    outside = sum(
        planned.seconds
        for op, planned in zip(graph.operators(), solved.plan.operators, strict=True)
        if op.block == 0
    )
    seconds = costs.seconds(cluster, 32)
    counts = np.array(model.counts)[:, None]
    loop = (seconds.total * counts)[:, : unit_costs.ONCE].sum()
    once = (seconds.total * counts)[:, unit_costs.ONCE].sum()
    number = unit_costs.TRACED_MICROBATCHES
    # Views, shapes and slices cost next to nothing and are left out.
    assert loop * number + once == pytest.approx(whole - outside, rel=0.01)


def test_memory_decides_what_may_run() -> None:
    """The 39B model on 64 GPUs cannot run as data parallelism alone."""
    row = read_table(GPT).rows[-1]
    plans = candidates("intra_only", row)
    assert all(plan.layouts[0].tensor > 1 for plan in plans)


def test_the_best_constant_is_one_of_the_numbers() -> None:
    cells = tuple(
        PredictedCell(1, "alpa", value, False, 2.0, "") for value in (1.0, 2.0, 4.0)
    )
    table = PredictedTable("t", cells)
    numbers = np.array([1.0, 2.0, 4.0])
    guesses = [abs(guess / numbers - 1).mean() for guess in np.arange(1, 4, 0.1)]
    assert table.constant_error() == pytest.approx(min(guesses))
    assert table.error() == pytest.approx((1 + 0 + 0.5) / 3)


def test_running_out_of_memory_is_a_prediction_too() -> None:
    both = PredictedCell(1, "alpa", None, False, None, "")
    one = PredictedCell(1, "alpa", None, False, 30.0, "")
    assert (both.error, one.error) == (0.0, 1.0)


@pytest.mark.slow
def test_a_system_that_routes_all_tokens_at_once_takes_the_most_that_fit() -> None:
    """DeepSpeed on one GPU: eight sequences, as Alpa's authors ran it, and slower."""
    constants = Constants.load()
    row = read_table(MOE).rows[0]
    simulator = Simulator(row, constants)
    found = predict("deepspeed", row, simulator, constants)
    assert found is not None and found.plan.num_microbatches == 1024 // 8
    system = replace(found.plan.system, has_one_group=False)
    faster = simulator.run(replace(found.plan, system=system), constants)
    assert faster is not None and faster.seconds < 0.9 * found.seconds


@pytest.mark.slow
def test_masks_of_a_gate_in_32_bits_halve_the_microbatch() -> None:
    """DeepSpeed on two GPUs: eight sequences each too; masks of 16 fit in 16 bits."""
    constants = Constants.load()
    row = read_table(MOE).rows[1]
    simulator = Simulator(row, constants)
    found = predict("deepspeed", row, simulator, constants)
    assert found is not None and found.plan.num_microbatches == 1024 // (2 * 8)
    system = replace(found.plan.system, gate_bytes=4)
    plan = replace(found.plan, num_microbatches=1024 // (2 * 16))
    narrow = simulator.run(replace(plan, system=system), constants)
    wide = simulator.run(plan, constants)
    assert narrow is not None and narrow.is_feasible
    assert wide is not None and not wide.is_feasible
    num_tokens = 16 * 1024
    assert wide.peak_bytes > 13 * 2 * num_tokens**2


def test_constants_are_fitted_on_gpts_alone() -> None:
    with pytest.raises(ValueError, match="has rows of moe; give alpa_osdi22_gpt"):
        fit_and_write(MOE)


def test_there_are_three_constants_and_their_fit_is_recorded() -> None:
    record = json.loads(FILE.read_text())
    assert tuple(record["constants"]) == NAMES and len(NAMES) == 3
    assert "--fit" in record["command"]
    assert record["error"] < record["constant_guess_error"]


def test_only_v100s_have_fitted_constants() -> None:
    """Others have their preset's; of a V100 the links inside a host are, too."""
    for kind in ("A100-80GB", "H100", "v5p"):
        preset = Cluster.preset(f"2x8x{kind}")
        assert Constants.of_kind(kind).applied(preset) == preset
    preset = Cluster.preset("2x8xV100")
    found = Constants.of_kind("V100").applied(preset)
    assert found.host_link == preset.host_link
    assert found.network_link.efficiency == NETWORK_EFFICIENCY
    single, half = (found.device.flops_per_second(d) for d in ("float32", "float16"))
    assert 11e12 < single < 12e12 and 70e12 < half < 83e12


def moves_of(layout: Layout, model: UnitModel) -> dict[str, set[tuple[str, ...]]]:
    """The axes over which experts' gradients are added up, and tokens are routed."""
    costs = unit_costs.unit_costs(model, layout, cluster_of(layout, "V100", START))
    experts = [i for i, unit in enumerate(model.units) if unit.experts]
    found: dict[str, set[tuple[str, ...]]] = {"experts": set(), "routed": set()}
    for move in costs.moves:
        if move.unit == experts[-1]:
            is_once = move.phase == unit_costs.ONCE
            found["experts" if is_once else "routed"].add(move.axes)
    return found


def test_experts_are_split_over_some_neighbours() -> None:
    """Tokens go to devices of their group; groups add up their experts' gradients."""
    model = moe_units(moe.Config.tiny())
    layout = Layout(2, 4, 8, 1, experts=4)
    found = moves_of(layout, model)
    assert found == {"experts": {("data",)}, "routed": {("expert",)}}
    assert layout.mesh.axis_sizes == (2, 4)


def test_deepspeed_tries_every_number_of_devices_that_share_experts() -> None:
    row = read_table(MOE).rows[3]
    layouts = [plan.layouts[0] for plan in candidates("deepspeed", row)]
    assert list(dict.fromkeys(each.experts for each in layouts)) == [2, 4, 0]
    assert {(each.data, each.tensor) for each in layouts} == {(8, 1)}


def test_zero_2_keeps_a_share_of_the_gradients() -> None:
    """Two bytes of a parameter, with nothing of an optimizer's to tell them apart."""
    row = replace(read_table(GPT).rows[1], model=tiny_gpt())
    layout, simulator = Layout(1, 2, 2, 1), Simulator(row, START)
    peaks = []
    for always in (False, True):
        plan = Plan((layout,), 64, System(reduces_always=always))
        found = simulator.run(plan, START)
        assert found is not None
        peaks.append(found.peak_bytes)
    params = simulator.costs(layout).param_bytes[list(row.model.sequence)].sum()
    assert peaks[0] - peaks[1] == pytest.approx(params / 2, rel=0.01)


def test_a_row_is_predicted_near_what_was_published() -> None:
    """The smallest row of each table: the slow test has them all."""
    constants = Constants.load()
    row = read_table(GPT).rows[1]
    simulator = Simulator(row, constants)
    cell = next(cell for cell in row.cells if cell.column == "alpa")
    found = predict("alpa", row, simulator, constants)
    assert found is not None and cell.tflops is not None
    assert row.tflops(found.simulated_seconds) == pytest.approx(cell.tflops, rel=0.2)
    # The head is done once where layers are done twice: by flops it counts for more.
    plan = replace(found.plan, system=FREE)
    by_seconds = simulator.run(plan, constants)
    assert by_seconds is not None and by_seconds.seconds < found.seconds
    assert found.bounds[1] > by_seconds.bounds[1]
