"""Tables that are not those at hand: read rightly, or refused with what is wrong."""

from pathlib import Path

import pytest

from autopar.clusters.cluster import Cluster
from benchmarks.published.published_plan import submesh
from benchmarks.published.runs import read_runs
from benchmarks.published.systems import candidates
from benchmarks.published.table import read_rows
from benchmarks.published.work import Layout
from benchmarks.suites import TABLES

HEAD, COLUMNS = (
    "# p3.16xlarge (8x V100-16GB per host), sequence length 512, global batch 1,536",
    "GPUs,Layers,Hidden,Heads,note,alpa_microbatches,alpa_plan,alpa-tflops,"
    "inter_only_tflops,pflop_per_iter",
)
ROW = "12,6,768,12,ours,48,2x(1;6),41.5,X,0.9"


def table(folder: Path, *rows: str, head: str = HEAD, columns: str = COLUMNS) -> Path:
    path = folder / "other.csv"
    path.write_text("\n".join([head, columns, *rows]), "utf-8")
    return path


def test_other_names_counts_and_notes_are_read(tmp_path: Path) -> None:
    """A number of GPUs that is no power of two, and of microbatches neither."""
    (row,) = read_rows(table(tmp_path, ROW))
    assert (row.num_gpus, row.batch_size, row.setting.seq_len) == (12, 1536, 512)
    assert [(each.devices, each.size) for each in row.plans["alpa"].layouts] == [
        *((6, 6), (6, 6))
    ]
    assert [(cell.column, cell.tflops) for cell in row.cells] == [
        *(("alpa", 41.5), ("inter_only", None))
    ]


def test_heads_with_units_and_other_orders_are_read(tmp_path: Path) -> None:
    columns = "Alpa (TFLOPS/GPU),Heads,# GPUs,intra-only TFLOPS,Layers,Hidden (units)"
    head = "# 4x A100-40GB per host, sequence length 512, batch size 1,536"
    path = table(
        *(tmp_path, "41.5,12,12,40,6,768,0.9"),
        head=head,
        columns=f"{columns},pflop_per_iter",
    )
    (row,) = read_rows(path)
    assert (row.num_gpus, row.setting.kind, row.setting.devices_per_host) == (
        *(12, "A100", 4),
    )
    assert row.setting.memory_bytes == 40 * 2**30
    assert [(cell.column, cell.tflops) for cell in row.cells] == [
        *(("alpa", 41.5), ("intra_only", 40.0))
    ]


def test_a_missing_column_is_told_beside_those_there_are(tmp_path: Path) -> None:
    columns = "gpus,layrs,hidden,heads,alpa_tflops"
    path = table(tmp_path, "4,24,1024,16,50", columns=columns)
    with pytest.raises(ValueError, match="'layers', but the .*; is it 'layrs'?"):
        read_rows(path)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_columns_are_divided_by_commas_and_other_signs(
    tmp_path: Path, delimiter: str
) -> None:
    columns = "gpus,layers,hidden,heads,alpa_tflops".replace(",", delimiter)
    row = "4,24,1024,16,50".replace(",", delimiter)
    (found,) = read_rows(table(tmp_path, row, columns=columns))
    assert (found.num_gpus, found.cells[0].tflops) == (4, 50.0)


@pytest.mark.parametrize(
    "name",
    ["alpa_osdi22_gpt", "alpa_osdi22_moe", "held_out/alpa_osdi22_wide_resnet"],
)
def test_flops_that_a_table_leaves_out_are_counted_as_its_authors_did(
    tmp_path: Path, name: str
) -> None:
    """From the sizes of each row, within a percent of what was published."""
    lines = (TABLES / f"{name}.csv").read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    lines = [line for line in lines if not line.startswith("#")]
    place = lines[0].split(",").index("pflop_per_iter")
    for line in lines[1:4]:
        parts = line.split(",")
        published = float(parts.pop(place)) * 1e15
        path = tmp_path / "left_out.csv"
        columns = [each for each in lines[0].split(",") if each != "pflop_per_iter"]
        path.write_text("\n".join([*head, ",".join(columns), ",".join(parts)]))
        (row,) = read_rows(path)
        assert row.flops == pytest.approx(published, rel=0.01)


PAPER = """\
# Megatron-LM on {machine}, {network}, seq 128, vocabulary 512, interleaved pipelines
Attention heads,Hidden size,Number of layers,Tensor model-parallel size,\
Pipeline model-parallel size,Number of GPUs,Batch size,Achieved teraFLOP/s per GPU
4,64,8,2,2,8,32,130
"""


@pytest.mark.parametrize(
    ("machine", "kind", "devices", "gibibytes"),
    [
        ("8x A100-80GB", "A100-80GB", 8, 80),
        ("4x NVIDIA H100-SXM5", "H100", 4, 80e9 / 2**30),
        ("4x TPU v5p", "v5p", 4, 95e9 / 2**30),
        ("8x V100-32GB", "V100", 8, 32),
    ],
)
def test_machines_are_those_of_presets(
    tmp_path: Path, machine: str, kind: str, devices: int, gibibytes: float
) -> None:
    path = tmp_path / "paper.csv"
    path.write_text(PAPER.format(machine=machine, network="8x 200 Gb/s between hosts"))
    setting = read_rows(path)[0].setting
    assert (setting.kind, setting.devices_per_host) == (kind, devices)
    assert setting.memory_bytes == pytest.approx(gibibytes * 2**30, rel=0.01)


def test_a_table_as_megatrons_paper_prints_it(tmp_path: Path) -> None:
    """No system, no microbatches: tensor and pipeline groups, and the rest searched."""
    path = tmp_path / "paper.csv"
    path.write_text(PAPER.format(machine="4x A100", network="100 Gbps between hosts"))
    (row,) = read_rows(path)
    assert (row.batch_size, row.setting.seq_len) == (32, 128)
    assert row.setting.vocab_size == 512
    assert [cell.column for cell in row.cells] == ["megatron"]
    assert row.plans["megatron"].layouts == (Layout(1, 4, 2, 2),) * 2
    tried = candidates("megatron", row)
    assert {plan.num_microbatches for plan in tried} == {1, 2, 4, 8, 16, 32}
    assert {p.num_chunks for p in tried if p.num_microbatches > 1} == {2, 4}


@pytest.mark.parametrize(
    ("network", "bytes_per_second"),
    [
        ("100 Gbps between hosts", 12.5e9),
        ("8x 200 Gb/s InfiniBand per node", 200e9),
        ("50 GB/s network", 50e9),
        ("300 GB/s NVLink per GPU", None),
    ],
)
def test_the_head_gives_the_bandwidth_between_hosts(
    tmp_path: Path, network: str, bytes_per_second: float | None
) -> None:
    path = tmp_path / "paper.csv"
    path.write_text(PAPER.format(machine="4x A100", network=network))
    (row,) = read_rows(path)
    assert row.setting.host_bandwidth == bytes_per_second
    cluster = row.setting.machine.of(Layout(2, 4, 8, 1))
    preset = Cluster.preset("2x4xA100").network_link.bandwidth
    expected = bytes_per_second / 4 if bytes_per_second else preset
    assert cluster.network_link.bandwidth == expected


def test_the_table_in_the_docs_is_read(tmp_path: Path) -> None:
    text = (TABLES.parents[1] / "docs" / "cost_model.md").read_text()
    path = tmp_path / "docs.csv"
    path.write_text("# Megatron" + text.split("```text\n# Megatron")[1].split("```")[0])
    (row,) = read_rows(path)
    (plan,) = candidates("megatron", row)
    assert plan.num_microbatches == 512 // (32 * 4)
    assert row.setting.host_bandwidth == 200e9 and row.setting.vocab_size == 51200


def test_microbatches_are_given_by_their_size_too(tmp_path: Path) -> None:
    columns = COLUMNS.replace("alpa_microbatches", "alpa_microbatch_size")
    (row,) = read_rows(table(tmp_path, ROW.replace("48", "8"), columns=columns))
    assert row.plans["alpa"].num_microbatches == 1536 // 8
    with pytest.raises(ValueError, match="7 examples do not divide 1536"):
        read_rows(table(tmp_path, ROW.replace("48", "7"), columns=columns))


def test_groups_that_are_not_all_gpus_are_refused(tmp_path: Path) -> None:
    columns = COLUMNS.replace("note", "alpa_tp").replace("alpa_plan", "alpa_pp")
    path = table(tmp_path, "12,6,768,12,4,48,2,41.5,X,0.9", columns=columns)
    with pytest.raises(ValueError, match="12 are not 1 x 4 x 2"):
        read_rows(path)


def test_a_machine_without_a_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of A100.* got 'V1000'"):
        read_rows(table(tmp_path, ROW, head="# 8x V1000-16GB per host"))


@pytest.mark.parametrize("text", ["OOM", "oom", "X", "×", "0"])
def test_what_ran_out_of_memory_is_told_in_many_ways(tmp_path: Path, text: str) -> None:
    (row,) = read_rows(table(tmp_path, ROW.replace("X", text)))
    assert [cell.tflops for cell in row.cells] == [41.5, None]


@pytest.mark.parametrize("text", ["", " ", "-", "N/A"])
def test_what_was_not_measured_is_left_out(tmp_path: Path, text: str) -> None:
    (row,) = read_rows(table(tmp_path, ROW.replace("X", text)))
    assert [cell.column for cell in row.cells] == ["alpa"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("41.5", "41;5", "`alpa_tflops` is a number above 0, but got '41;5'"),
        ("41.5", "~41", "is a number above 0"),
        ("12,6,", "twelve,6,", "`gpus` is a whole number above 0, but got 'twelve'"),
        ("768", "768.5", "`hidden` is a whole number"),
        (",48,", ",,", "`alpa_microbatches` is a whole number above 0, but got ''"),
        ("2x(1;6)", "2x(1;8)", "those of alpa have 16 of 12"),
        ("2x(1;6)", "3 stages", "a plan is written as"),
        ("2x(1;6)", "3x(1;4) logical (4;1)(2;2)", "one for each of its 3 submeshes"),
        (",0.9", ",0", "`pflop_per_iter` is a number above 0"),
        (",0.9", "", "a row has a value for each column"),
        (",0.9", ",0.9,1", "a row has a value for each column"),
    ],
)
def test_entries_that_cannot_be_are_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError) as found:
        read_rows(table(tmp_path, ROW.replace(old, new, 1)))
    assert message in str(found.value)


@pytest.mark.parametrize("column", ["GPUs", "Layers", "Heads", "Hidden"])
def test_a_column_that_is_missing_is_named(tmp_path: Path, column: str) -> None:
    columns = COLUMNS.replace(column, "other")
    with pytest.raises(ValueError, match=f"needs the column '{column.lower()}'"):
        read_rows(table(tmp_path, ROW, columns=columns))


def test_a_table_in_other_units_is_refused(tmp_path: Path) -> None:
    columns = COLUMNS.replace("tflops", "pflops")
    with pytest.raises(ValueError, match="whose names end in '_tflops', but"):
        read_rows(table(tmp_path, ROW, columns=columns))


def test_a_machine_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but says 'A100' otherwise"):
        read_rows(table(tmp_path, ROW, head="# 4 nodes of 8 A100, batch 64"))


def test_the_column_of_an_unknown_system_is_named(tmp_path: Path) -> None:
    columns = COLUMNS.replace("inter_only", "gspmd")
    found = read_rows(table(tmp_path, ROW, columns=columns))
    with pytest.raises(ValueError, match="is one of alpa, inter_only, .* but got 'gsp"):
        candidates("gspmd", found[0])


def test_submeshes_of_any_number_have_equal_hosts() -> None:
    assert [submesh(n, 8) for n in (1, 8, 12, 16, 20, 64)] == [
        *((1, 1), (1, 8), (2, 6), (2, 8), (4, 5), (8, 8))
    ]


def test_tables_at_hand_are_read() -> None:
    counts = {path.stem: len(read_runs(path)) for path in TABLES.rglob("*.csv")}
    assert counts == {
        "alpa_osdi22_gpt": 28,
        "alpa_osdi22_moe": 20,
        "alpa_osdi22_moe_large": 8,
        "alpa_osdi22_wide_resnet": 24,
        "megatron_sc21": 10,
        "maxtext_tpu_a3": 29,
        "megatron_bridge_nemo": 45,
        "torchtitan_llama": 16,
    }
