"""The deterministic part of the benchmarks is what `benchmarks/golden.json` holds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import golden
from benchmarks.request import Request
from benchmarks.results import Machine, Result, ResultFile
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[2]
MACHINE = Machine("golden", "x86_64", 2, "3.11.0", "0.10.2")
BEFORE = Result("plan", "mlp x:8", {"peak_bytes": 1000.0, "gap": 0.0})
# One case of each suite that takes a second at most.
QUICK = {
    "plan": "mlp x:8",
    "quality": "mlp data:2;tensor:4 Megatron",
    "simulate": "alpa_osdi22_gpt",
    "pipeline": "one_f_one_b 4 stages",
}


def differences(after: Result) -> list[str]:
    return golden.differences(*(ResultFile(MACHINE, (r,)) for r in (BEFORE, after)))


def test_a_case_of_each_quick_suite_gives_the_golden_numbers() -> None:
    asked = Request(small=True, rounds=1, is_timed=False)
    results: list[Result] = []
    for suite, name in QUICK.items():
        (case,) = [each for each in SUITES[suite](asked) if each.name == name]
        results += case.measure()
    found = golden.without_times(results)
    cases = {(each.suite, each.case) for each in found.results}
    assert {suite for suite, _ in cases} == set(QUICK)
    kept = ResultFile.load(golden.FILE)
    same = [each for each in kept.results if (each.suite, each.case) in cases]
    assert not golden.differences(replace(kept, results=tuple(same)), found)


@pytest.mark.slow
@pytest.mark.ray
def test_every_suite_runs_small_and_gives_the_golden_numbers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("results.json", "results.html")]
    command = ["-m", "autopar", "bench", "all", "--small"]
    done = subprocess.run(
        [sys.executable, *command, f"--json={paths[0]}", f"--html={paths[1]}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(SUITES) <= set(done.stdout.splitlines())  # the heads of tables
    found = ResultFile.load(paths[0]).results
    cases = [each.case for each in found if each.suite == "step"]
    assert "calls with 500 leaves" in cases
    for each in found:
        assert each.values or each.timed or each.note, each
    kept = ResultFile.load(golden.FILE)
    assert {each.suite for each in kept.results} == set(SUITES)
    moved = golden.differences(kept, golden.without_times(found))
    assert not moved, "\n".join([*moved, "if meant: python -m benchmarks.golden"])
    assert paths[1].read_text().count("<h2>") == len(SUITES)


def altered(kept: ResultFile) -> Iterator[tuple[str, ResultFile]]:
    """The golden file with one byte count, or the like, a little higher."""
    for number, each in enumerate(kept.results):
        for name, value in each.values.items():
            if name == "gap":
                continue
            rise = 1 if name.endswith("bytes") else 0.002 * abs(value) + 1e-3
            rise = 0.002 * value if name == "compiled_memory_bytes" else rise
            other = replace(each, values={**each.values, name: value + rise})
            results = (*kept.results[:number], other, *kept.results[number + 1 :])
            yield f"{each.suite} {each.case}: {name}", replace(kept, results=results)


def test_each_golden_number_is_watched() -> None:
    kept = ResultFile.load(golden.FILE)
    assert not golden.differences(kept, kept)
    for name, other in altered(kept):
        (line,) = golden.differences(kept, other)
        assert line.startswith(name)


def test_a_number_that_moves_either_way_is_named() -> None:
    for held in (999.0, 1001.0):
        (line,) = differences(replace(BEFORE, values={"peak_bytes": held, "gap": 0.0}))
        assert "plan mlp x:8: peak_bytes 1,000 B ->" in line


def test_gaps_may_move_while_they_are_small() -> None:
    assert not differences(replace(BEFORE, values={**BEFORE.values, "gap": 1e-5}))
    assert differences(replace(BEFORE, values={**BEFORE.values, "gap": 0.1}))


def test_cases_numbers_and_refusals_that_come_or_go_are_named() -> None:
    assert "gap in one file only" in differences(replace(BEFORE, values={}))[0]
    (line,) = differences(replace(BEFORE, note="does not divide"))
    assert "'' -> 'does not divide'" in line
    other = ResultFile(MACHINE, (BEFORE, replace(BEFORE, case="gpt x:8")))
    assert len(golden.differences(ResultFile(MACHINE, (BEFORE,)), other)) == 1


def test_a_case_that_failed_is_no_golden_number() -> None:
    with pytest.raises(RuntimeError, match="must succeed, but: plan: mlp x:8"):
        golden.without_times([replace(BEFORE, failure="ValueError: no")])
