"""The deterministic part of the benchmarks is what `benchmarks/golden.json` holds."""

from dataclasses import replace

from benchmarks import golden
from benchmarks.results import Machine, Result, ResultFile
from benchmarks.suites import SUITES

MACHINE = Machine("golden", "x86_64", 2, "3.11.0", "0.10.2")
BEFORE = Result("plan", "mlp x:8", {"peak_bytes": 1000.0, "gap": 0.0})


def differences(after: Result) -> list[str]:
    return golden.differences(*(ResultFile(MACHINE, (r,)) for r in (BEFORE, after)))


def test_what_no_clock_tells_is_as_it_was_in_every_suite() -> None:
    kept = ResultFile.load(golden.FILE)
    cases = {(each.suite, each.case) for each in kept.results}
    assert {suite for suite, _ in cases} == set(SUITES)
    found = golden.differences(kept, golden.measured())
    assert not found, "\n".join([*found, "if meant: python -m benchmarks.golden"])


def test_a_number_that_moves_either_way_is_named() -> None:
    for held in (990.0, 1010.0):
        (line,) = differences(replace(BEFORE, values={"peak_bytes": held, "gap": 0.0}))
        assert "plan mlp x:8: peak_bytes 1000 ->" in line


def test_gaps_may_move_while_they_are_small() -> None:
    assert not differences(replace(BEFORE, values={**BEFORE.values, "gap": 1e-5}))
    assert differences(replace(BEFORE, values={**BEFORE.values, "gap": 0.1}))


def test_cases_numbers_and_refusals_that_come_or_go_are_named() -> None:
    assert len(differences(replace(BEFORE, case="gpt x:8"))) == 2
    assert "gap in one file only" in differences(replace(BEFORE, values={}))[0]
    (line,) = differences(replace(BEFORE, note="does not divide"))
    assert "'' -> 'does not divide'" in line
