"""Tables of Wide-ResNets: how they are read, what they cost, and what does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import names, resnet
from benchmarks.published.constants import Constants
from benchmarks.published.pipeline_time import Simulator
from benchmarks.published.prediction import predict_table, simulators_of
from benchmarks.published.published_plan import parse_layouts
from benchmarks.published.resnet_units import resnet_units
from benchmarks.published.systems import candidates, predict
from benchmarks.published.table import read_table
from benchmarks.published.unit_costs import Layout
from benchmarks.suites import TABLES

# The sizes of the Alpa paper; the numbers are made up.
TABLE = """\
# Wide-ResNet weak scaling, p3.16xlarge (8x V100-16GB NVLink per host, 25 Gbps between \
hosts), image 224, 1024 classes, global batch 1536, fp32, full remat.
gpus,layers,channels,width_factor,params_billion,alpa_microbatches,alpa_plan,\
PP-DP_tflops,inter_only_tflops,intra_only_tflops,alpa_tflops,pflop_per_iter
1,50,160,2,0.25,24,1x(1;1),9.0,9.0,9.0,9.0,0.49
16,50,640,2,4.0,32,2x(1;4)+(1;8) logical (4;1)(4;1)(8;1),OOM,5.0,0,8.0,7.8
32,50,320,16,6.8,38,4x(1;8) logical (8;1),OOM,OOM,4.0*,7.5,13.1
64,101,320,16,13.0,,,OOM,OOM,OOM,7.0,25.0
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "wide_resnet.csv"
    found.write_text(TABLE)
    return found


def test_the_table_is_read(path: Path) -> None:
    rows = read_table(path).rows
    assert [row.num_gpus for row in rows] == [1, 16, 32, 64]
    assert {row.model.name for row in rows} == {"wide-resnet"}
    for row, billions in zip(rows, (0.25, 4.0, 6.8, 13.0), strict=True):
        pairs = zip(row.model.num_params, row.model.counts, strict=True)
        total = sum(size * count for size, count in pairs)
        assert total == pytest.approx(billions * 1e9, rel=0.04)
    columns = ["pp_dp", "inter_only", "intra_only", "alpa"]
    assert [cell.column for cell in rows[1].cells] == columns
    assert [cell.tflops for cell in rows[1].cells] == [None, 5.0, None, 8.0]
    assert rows[1].plans["alpa"].layouts == (
        *(Layout(1, 4, 4, 1),) * 2,
        Layout(1, 8, 8, 1),
    )


def test_examples_that_microbatches_do_not_divide_are_left_out(path: Path) -> None:
    rows = read_table(path).rows
    assert [row.batch_size for row in rows] == [1536, 1536, 1520, 1536]
    assert {plan.num_microbatches for plan in candidates("alpa", rows[2])} == {38}
    counts = {plan.num_microbatches for plan in candidates("intra_only", rows[2])}
    assert {1, 16, 19, 38, 1520} <= counts


def test_submeshes_are_added_up() -> None:
    shapes = [(1, 4, 4, 1), (1, 4, 1, 4), (1, 8, 1, 8)]
    text = "2x(1;4)+(1;8) logical (4;1)(1;4)(1;8)"
    assert parse_layouts(text, 8) == tuple(Layout(*each) for each in shapes)
    assert parse_layouts("4+(1;8)", 8) == (Layout(1, 4, 1, 4), Layout(1, 8, 1, 8))


def tiny() -> resnet.Config:
    return resnet.Config((1,), 16, 16, 16, 64, "bottleneck", width_factor=2)


def test_what_the_axes_of_a_published_shape_split_is_searched(path: Path) -> None:
    """The first stages split the batch, those behind layers too; GPTs' are as given."""
    row = read_table(path).rows[1]
    shapes = {
        tuple(each.tensor for each in plan.layouts) for plan in candidates("alpa", row)
    }
    assert {(1, 1, 1), (1, 4, 4), (1, 1, 8), (4, 4, 8)} <= shapes
    assert all(
        (each.hosts, each.devices) == (given.hosts, given.devices)
        for plan in candidates("alpa", row)
        for each, given in zip(plan.layouts, row.plans["alpa"].layouts, strict=True)
    )
    gpt = read_table(TABLES / "alpa_osdi22_gpt.csv").rows[3]
    assert len(candidates("alpa", gpt)) == 1


def test_what_does_not_fit_is_out_of_memory(path: Path) -> None:
    """A tiny network on one GPU, with the memory of a V100 and with next to none."""
    published, constants = read_table(path).rows[0], Constants.load()
    model, found = resnet_units(tiny()), []
    for memory_bytes in (16 * 2**30, 2**17):
        setting = replace(published.setting, memory_bytes=memory_bytes)
        row = replace(published, model=model, setting=setting)
        found.append(predict("inter_only", row, Simulator(row, constants), constants))
    fits, does_not = found
    assert fits is not None and does_not is None
    # Momentum, gradient and parameter of 32 bits each.
    least = 12 * sum(
        size * count for size, count in zip(model.num_params, model.counts, strict=True)
    )
    assert 2**17 < least < fits.peak_bytes


def test_a_pipeline_has_no_more_stages_than_blocks(path: Path) -> None:
    """One GPU a stage: 32 stages of 16 blocks, a stem and a head."""
    row, constants = read_table(path).rows[2], Constants.load()
    assert predict("inter_only", row, Simulator(row, constants), constants) is None


@pytest.mark.slow
def test_predictions_are_below_the_peak(path: Path) -> None:
    """15.7 Tflop/s in 32 bits; the table counts recomputation as work."""
    constants, table = Constants.load(), read_table(path)
    table = replace(table, rows=table.rows[:2])
    found = predict_table(table, simulators_of(table, constants), constants)
    alpa = [cell.predicted for cell in found.cells if cell.column == "alpa"]
    assert len(alpa) == 2
    for predicted in alpa:
        assert predicted is not None and 3 < predicted < 15.7


def test_every_published_size_has_a_name() -> None:
    sizes = ("250m", "500m", "1b", "2b", "4b", "6.8b", "13b")
    assert {f"wide-resnet-{size}" for size in sizes} <= set(names())
