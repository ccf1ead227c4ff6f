"""Results of benchmarks: as text, as files, beside each other, as a page."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.comparison import compare
from benchmarks.result_page import page
from benchmarks.result_tables import suite_table
from benchmarks.results import Machine, Origin, Result, ResultFile

MACHINE = Machine("here", "x86_64", 2, "3.11.0", "0.10.2")
BEFORE = Result("plan", "mlp x:8", {"peak_bytes": 1000.0}, {"plan_seconds": 1.0})


def file(*results: Result, machine: Machine = MACHINE) -> ResultFile:
    return ResultFile(machine, results)


def test_a_result_is_printed_with_units() -> None:
    values = {"modelled_seconds": 0.0005601, "peak_bytes": 1.5 * 2**20, "gap": 1e-15}
    result = Result("plan", "mlp x:8", values, {"times_jit": 1.0213}, "a note")
    assert str(result) == (
        "plan: mlp x:8: modelled 560 us, peak 1.5 MiB, gap 0, times jit 1.021 (a note)"
    )


def test_a_table_has_a_row_a_case_and_reasons_below() -> None:
    refused = Result("plan", "gpt x:8", note="does not divide")
    failed = Result("plan", "moe x:8", failure="ValueError: no")
    console = Console(width=100)
    with console.capture() as printed:
        console.print(suite_table("plan", [BEFORE, refused, failed]))
    lines = [line.split() for line in printed.get().splitlines()]
    assert lines[0] == ["plan"] and lines[1] == ["case", "peak", "plan"]
    assert lines[2] == ["mlp", "x:8", "1,000", "B", "1", "s"]
    assert "gpt x:8: refused: does not divide" in printed.get()
    assert "moe x:8: failed: ValueError: no" in printed.get()


def test_a_gap_without_a_bound_is_unknown(tmp_path: Path) -> None:
    results = [
        Result("plan", case, {"gap": inf, "b": held})
        for case, held in (("x", 2.0), ("y", 3.0))
    ]
    assert str(results[0]) == "plan: x: gap unknown, b 2"
    found = page(file(*results))
    assert "<td>unknown</td>" in found and "nan" not in found
    assert found.count("<svg") == 1
    path = tmp_path / "results.json"
    file(*results).save(path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["results"][0]["values"]["gap"] is None
    assert ResultFile.load(path) == file(*results)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    written = ResultFile(MACHINE, (BEFORE,), Origin("autopar bench plan", "a1", "now"))
    written.save(path)
    assert ResultFile.load(path) == written


def test_results_say_what_ran_them() -> None:
    origin = Origin.here("autopar bench plan")
    assert origin.command == "autopar bench plan" and origin.day.count("-") == 2
    text = page(ResultFile(MACHINE, (BEFORE,), origin))
    assert "<code>autopar bench plan</code>" in text and str(MACHINE) in text


@pytest.mark.parametrize("text", ["{}", "[]", "no", "\x00"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a result file is what autopar bench"):
        ResultFile.load(path)


def test_one_byte_more_is_a_regression() -> None:
    after = replace(BEFORE, values={"peak_bytes": 1001.0})
    found = compare(file(BEFORE), file(after))
    (change,) = found.regressions
    assert (change.name, change.before, change.after) == ("peak_bytes", 1000, 1001)
    assert found.is_worse and not found.improvements
    assert compare(file(after), file(BEFORE)).improvements == (
        replace(change, before=1001.0, after=1000.0),
    )


def test_what_falls_or_is_within_its_tolerance_is_none() -> None:
    after = replace(BEFORE, values={"peak_bytes": 900.0}, timed={"plan_seconds": 1.2})
    assert not compare(file(BEFORE), file(after)).is_worse
    slow = replace(BEFORE, timed={"plan_seconds": 1.3})
    assert len(compare(file(BEFORE), file(slow)).regressions) == 1


def test_rounding_of_a_closed_gap_is_no_regression() -> None:
    gaps = [replace(BEFORE, values={"gap": gap}) for gap in (1e-16, 5e-10, 0.01)]
    assert not compare(file(gaps[0]), file(gaps[1])).regressions
    assert compare(file(gaps[0]), file(gaps[2])).regressions


def test_more_throughput_is_better() -> None:
    fast, slow = (replace(BEFORE, values={"predicted_tflops": x}) for x in (50.0, 40.0))
    assert compare(file(fast), file(slow)).regressions
    assert compare(file(slow), file(fast)).improvements


def test_a_bound_that_is_lost_is_a_regression() -> None:
    bound, none = (replace(BEFORE, values={"gap": gap}) for gap in (0.01, inf))
    (change,) = compare(file(bound), file(none)).regressions
    assert str(change) == "plan mlp x:8: gap 1.00% -> unknown"
    assert not compare(file(none), file(none)).regressions


def test_a_case_that_has_no_numbers_any_more_is_a_regression() -> None:
    for after in (
        Result("plan", "mlp x:8", note="does not divide"),
        Result("plan", "mlp x:8", failure="ValueError: no"),
    ):
        found = compare(file(BEFORE), file(after))
        (loss,) = found.losses
        assert (after.note or after.failure) in loss
        assert found.is_worse and "1 regressions" in str(found)


def test_timings_of_different_machines_are_warned_of_and_not_judged() -> None:
    after = replace(BEFORE, values={"peak_bytes": 1010.0}, timed={"plan_seconds": 9.0})
    for other in (
        replace(MACHINE, host="there"),
        replace(MACHINE, devices="1 NVIDIA H100"),
    ):
        found = compare(file(BEFORE), file(after, machine=other))
        assert [change.name for change in found.regressions] == ["peak_bytes"]
        assert "different machines" in found.warnings[0]


def test_cases_of_one_file_only_are_warned_of() -> None:
    other = replace(BEFORE, case="gpt x:8")
    third = replace(BEFORE, case="moe x:8")
    found = compare(file(BEFORE, other), file(BEFORE, third))
    assert len(found.warnings) == 2 and not found.is_worse


def test_files_that_share_no_case_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="must share cases.*plan mlp x:8.*plan gpt"):
        compare(file(BEFORE), file(replace(BEFORE, case="gpt x:8")))


def test_the_page_escapes_what_it_shows() -> None:
    text = page(file(replace(BEFORE, case="<b>"), BEFORE))
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_the_page_has_bytes_in_full_and_no_bars_of_rounding() -> None:
    cases = [
        replace(BEFORE, case=case, values={"peak_bytes": held, "gap": 1e-15})
        for case, held in (("a", 1925660.0), ("b", 1000.5))
    ]
    text = page(file(*cases))
    assert "1,925,660" in text and "<td>1000</td>" in text
    assert "<figcaption>peak</figcaption>" in text and ">gap</figcap" not in text
    assert "<td>0</td>" in text and "e-15" not in text


def test_bars_are_as_long_as_their_numbers_and_labels_fit() -> None:
    long = "wide-resnet-250m data:2;tensor:4 Megatron sequence"
    cases = [
        Result("quality", name, {"peak_bytes": held})
        for name, held in ((long, 100.0), ("mlp x:8 solver", 50.0))
    ]
    text = page(file(*cases))
    assert "width='320.0'" in text and "width='160.0'" in text
    assert text.count("class='ours'") == 1
    label = int(text.split("<rect x='")[1].split("'")[0])
    assert label >= 7 * len(long)


def test_the_page_shows_what_changed() -> None:
    after = file(replace(BEFORE, values={"peak_bytes": 2000.0}))
    text = page(after, compare(file(BEFORE), after))
    assert "class='regression'" in text and "1 regressions" in text
