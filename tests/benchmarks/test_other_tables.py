"""Tables that are not those at hand: read rightly, or refused with what is wrong."""

from pathlib import Path

import pytest

from benchmarks.published.table import read_table, submesh
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
    (row,) = read_table(table(tmp_path, ROW)).rows
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
    (row,) = read_table(path).rows
    assert (row.num_gpus, row.setting.kind, row.setting.devices_per_host) == (
        *(12, "A100", 4),
    )
    assert row.model.units and row.setting.memory_bytes == 40 * 2**30
    assert [(cell.column, cell.tflops) for cell in row.cells] == [
        *(("alpa", 41.5), ("intra_only", 40.0))
    ]


def test_a_missing_column_is_told_beside_those_there_are(tmp_path: Path) -> None:
    columns = "gpus;layers;hidden;heads;alpa_tflops"
    path = table(tmp_path, "4;24;1024;16;50", columns=columns)
    with pytest.raises(ValueError, match=f"'gpus', but the columns.* {columns}"):
        read_table(path)
    path = table(tmp_path, "4,24,1024,16,50", columns=columns.replace(";", ","))
    with pytest.raises(ValueError, match="flops of an iteration by which"):
        read_table(path)


@pytest.mark.parametrize("text", ["OOM", "oom", "X", "×", "0"])
def test_what_ran_out_of_memory_is_told_in_many_ways(tmp_path: Path, text: str) -> None:
    (row,) = read_table(table(tmp_path, ROW.replace("X", text))).rows
    assert [cell.tflops for cell in row.cells] == [41.5, None]


@pytest.mark.parametrize("text", ["", " ", "-", "N/A"])
def test_what_was_not_measured_is_left_out(tmp_path: Path, text: str) -> None:
    (row,) = read_table(table(tmp_path, ROW.replace("X", text))).rows
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
        read_table(table(tmp_path, ROW.replace(old, new, 1)))
    assert message in str(found.value)


@pytest.mark.parametrize("column", ["GPUs", "Layers", "Heads", "pflop_per_iter"])
def test_a_column_that_is_missing_is_named(tmp_path: Path, column: str) -> None:
    columns = COLUMNS.replace(column, "other")
    with pytest.raises(ValueError, match=f"needs the column '{column.lower()}'"):
        read_table(table(tmp_path, ROW, columns=columns))


def test_a_table_in_other_units_is_refused(tmp_path: Path) -> None:
    columns = COLUMNS.replace("tflops", "pflops")
    with pytest.raises(ValueError, match="whose names end in '_tflops', but"):
        read_table(table(tmp_path, ROW, columns=columns))


def test_a_machine_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but says 'A100' otherwise"):
        read_table(table(tmp_path, ROW, head="# 4 nodes of 8 A100, batch 64"))


def test_the_column_of_an_unknown_system_is_named(tmp_path: Path) -> None:
    columns = COLUMNS.replace("inter_only", "gspmd")
    found = read_table(table(tmp_path, ROW, columns=columns))
    from benchmarks.published.systems import candidates

    with pytest.raises(ValueError, match="is one of alpa, inter_only, .* but got 'gsp"):
        candidates("gspmd", found.rows[0])


def test_submeshes_of_any_number_have_equal_hosts() -> None:
    assert [submesh(n, 8) for n in (1, 8, 12, 16, 20, 64)] == [
        *((1, 1), (1, 8), (2, 6), (2, 8), (4, 5), (8, 8))
    ]


def test_tables_at_hand_are_read_as_before() -> None:
    counts = [len(read_table(path).rows) for path in sorted(TABLES.glob("*.csv"))]
    assert counts == [7, 5]
