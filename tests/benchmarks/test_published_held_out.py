"""Tables on which nothing was fitted: of another machine, and what does not fit."""

import pytest

from benchmarks.published.constants import Constants
from benchmarks.published.pipeline_time import Simulator
from benchmarks.published.systems import predict
from benchmarks.published.table import Row, read_table
from benchmarks.suites import TABLES

FOLDER = TABLES / "held_out"


def predicted(row: Row, column: str) -> float | None:
    constants = Constants.of_kind(row.setting.kind)
    found = predict(column, row, Simulator(row, constants), constants)
    return row.tflops(found.simulated_seconds) if found else None


@pytest.mark.parametrize("place", [0, 1])
def test_megatron_on_a100s_is_predicted_by_the_preset_alone(place: int) -> None:
    """Data parallel, and with tensor groups; microbatches are searched."""
    row = read_table(FOLDER / "megatron_sc21.csv").rows[place]
    found = predicted(row, "megatron")
    assert found == pytest.approx(row.cells[0].tflops, rel=0.12)


def test_deepspeeds_experts_are_out_of_memory_on_64_gpus() -> None:
    row = read_table(FOLDER / "alpa_osdi22_moe_large.csv").rows[1]
    assert row.cells[0].column == "deepspeed" and row.cells[0].tflops is None
    assert predicted(row, "deepspeed") is None


def test_a_wide_resnet_in_32_bits_is_predicted_near_what_was_published() -> None:
    row = read_table(FOLDER / "alpa_osdi22_wide_resnet.csv").rows[0]
    assert predicted(row, "inter_only") == pytest.approx(8.3, rel=0.12)
