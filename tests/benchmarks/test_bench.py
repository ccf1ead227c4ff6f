"""`autopar bench`: what it runs, keeps, compares and says of mistakes."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.commands import bench_command
from benchmarks import golden, suites
from benchmarks.result_page import page
from benchmarks.results import Machine, Result, ResultFile, compare
from benchmarks.suites import Request

MACHINE = Machine("here", "x86_64", 2, "3.11.0", "0.10.2")


def run(*args: str) -> int:
    """The exit code; 0 if none was raised."""
    try:
        main(args)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def file(*results: Result, machine: Machine = MACHINE) -> ResultFile:
    return ResultFile(machine, results)


BEFORE = Result("plan", "mlp x:8", {"peak_bytes": 1000.0}, {"plan_seconds": 1.0})


def test_a_result_is_printed_with_units() -> None:
    values = {"modelled_seconds": 0.0005601, "peak_bytes": 1.5 * 2**20, "gap": 1e-15}
    result = Result("plan", "mlp x:8", values, {"times_jit": 1.0213}, "a note")
    assert str(result) == (
        "plan: mlp x:8: modelled 560 us, peak 1.5 MiB, gap 0, times jit 1.021 (a note)"
    )


def test_a_gap_without_a_bound_is_unknown() -> None:
    results = [Result("plan", case, {"gap": float("inf"), "b": 2.0}) for case in "xy"]
    assert str(results[0]) == "plan: x: gap unknown, b 2"
    found = page(file(*results))
    assert "<td>unknown</td>" in found and "nan" not in found
    assert found.count("<svg") == 1


def test_help_lists_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    printed = capsys.readouterr().out
    for name in (*suites.SUITES, "all", "compare"):
        assert f"\n  {name}" in printed
    assert "..." not in printed.split("Commands:")[1]  # each in one line


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    file(BEFORE).save(path)
    assert ResultFile.load(path) == file(BEFORE)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="a result file is what autopar bench"):
        ResultFile.load(path)


def test_what_rises_is_a_regression() -> None:
    after = replace(BEFORE, values={"peak_bytes": 1010.0})
    (change,) = compare(file(BEFORE), file(after)).regressions
    assert (change.name, change.before, change.after) == ("peak_bytes", 1000, 1010)


def test_what_falls_or_is_within_its_tolerance_is_none() -> None:
    after = replace(BEFORE, values={"peak_bytes": 900.0}, timed={"plan_seconds": 1.2})
    assert not compare(file(BEFORE), file(after)).regressions
    slow = replace(BEFORE, timed={"plan_seconds": 1.3})
    assert len(compare(file(BEFORE), file(slow)).regressions) == 1


def test_timings_of_different_machines_are_warned_of_and_not_judged() -> None:
    after = replace(BEFORE, values={"peak_bytes": 1010.0}, timed={"plan_seconds": 9.0})
    other = replace(MACHINE, host="there")
    found = compare(file(BEFORE), file(after, machine=other))
    assert [change.name for change in found.regressions] == ["peak_bytes"]
    assert "different machines" in found.warnings[0]


def test_cases_of_one_file_only_are_warned_of() -> None:
    found = compare(file(BEFORE), file(replace(BEFORE, case="gpt x:8")))
    assert len(found.warnings) == 2 and not found.changes


def test_the_command_compares_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    file(BEFORE).save(paths[0])
    file(replace(BEFORE, values={"peak_bytes": 2000.0})).save(paths[1])
    assert run("bench", "compare", str(paths[0]), str(paths[0])) == 0
    assert run("bench", "compare", *map(str, paths)) == 1
    assert "REGRESSION plan mlp x:8: peak_bytes" in capsys.readouterr().out


def test_planning_is_measured_kept_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("results.json", "results.html")]
    written = [f"--json={paths[0]}", f"--html={paths[1]}"]
    asked = ["--model=mlp", "--mesh=x:8", "--mesh=x:4;y:2"]
    assert run("bench", "plan", *asked, *written) == 0
    found = ResultFile.load(paths[0]).results
    assert [each.case for each in found] == ["mlp x:8", "mlp x:4;y:2"]
    assert all(each.values["collective_bytes"] > 0 for each in found)
    assert "<svg" in paths[1].read_text()
    assert run("bench", "plan", *asked, f"--against={paths[0]}") in (0, 1)
    assert "numbers compared" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
def test_every_suite_runs_small_and_gives_the_golden_numbers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("results.json", "results.html")]
    written = [f"--json={paths[0]}", f"--html={paths[1]}"]
    assert run("bench", "all", "--small", *written) == 0
    found = ResultFile.load(paths[0]).results
    assert {each.suite for each in found} == set(suites.SUITES)
    cases = [each.case for each in found if each.suite == "step"]
    assert "calls with 500 leaves" in cases
    for each in found:
        assert each.values or each.timed or each.note, each
    untimed = tuple(replace(each, timed={}) for each in found if each.values)
    assert not golden.differences(ResultFile.load(golden.FILE), file(*untimed))
    assert paths[1].read_text().count("<h2>") == len(suites.SUITES)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "--model=gtp"), "did you mean 'gpt'"),
        (("plan", "--model=mlp", "--cluster=8x8xH10"), "did you mean"),
        (("plan", "--model=mlp", "--json=nowhere/x.json"), "make it first"),
        (("plan", "--model=mlp", "--against=nowhere.json"), "no file nowhere.json"),
        (("simulate", "nowhere.csv"), "must be a CSV file, but nowhere.csv is none"),
    ],
)
def test_mistakes_name_the_remedy(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *args) == 1
    assert message in capsys.readouterr().err


def test_a_suite_that_fails_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Request) -> Iterator[Result]:
        yield BEFORE
        raise RuntimeError("no hosts")

    own = {"plan": fails, "step": lambda _: iter([replace(BEFORE, suite="step")])}
    monkeypatch.setattr(suites, "SUITES", own)
    path = tmp_path / "results.json"
    assert run("bench", "all", f"--json={path}") == 1
    found = ResultFile.load(path).results
    assert [each.case for each in found] == ["mlp x:8", "failed", "mlp x:8"]
    assert found[1].note == "RuntimeError: no hosts"


def test_steps_on_ray_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "RAY_SECONDS", 0.3)
    with pytest.raises(RuntimeError, match="must end within 0.3 s, but were still"):
        suites.run(["ray"], Request(small=True), print)


def test_an_unknown_suite_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'quality'"):
        suites.run(["qualty"], Request(), print)


def test_an_installed_package_says_where_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_command, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="run it from a checkout"):
        bench_command._checkout("benchmarks.suites")


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
    assert "<h3>peak_bytes</h3>" in text and "<h3>gap</h3>" not in text
    assert "<td>0</td>" in text and "e-15" not in text
