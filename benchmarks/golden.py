"""What benchmarks give on any machine beside what it was: bytes, memory, gaps, errors.

All suites of `autopar bench all --small`; what is timed runs once and is left out. Of
steps on Ray there is the plan alone, as hosts take long to start. `make test` compares
with `golden.json` (tests/benchmarks/test_golden.py). Where a change is meant to move
numbers, write the file again and let the diff say which:

    python -m benchmarks.golden
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import suites
from benchmarks.results import Machine, Result, ResultFile, compare
from benchmarks.suites import Request

FILE = Path(__file__).with_name("golden.json")
_TOLERANCE = 1e-3  # of values; libraries of other builds round differently
_GAP, _GAP_DIGITS = 1e-3, 6


def measured() -> ResultFile:
    """The suites' small cases on eight devices, without what is timed.

    Gaps are rounded: what is left of a closed one is noise.
    """
    request = Request(small=True, rounds=1, is_timed=False)
    found = [each for suite in suites.SUITES.values() for each in suite(request)]
    results = tuple(replace(each, values=_rounded(each), timed={}) for each in found)
    return ResultFile(replace(Machine.here(), host="golden"), results)


def differences(before: ResultFile, after: ResultFile) -> list[str]:
    """What is not as it was, a line each: numbers, cases, and reasons of refusals.

    A gap is solver time turned into rounding: it only has to stay small.
    """
    comparison = compare(before, after)
    found = [each for each in comparison.warnings if "file only" in each]
    found += [
        str(change)
        for change in comparison.changes
        if change.name != "gap"
        and abs(change.after - change.before) > _TOLERANCE * abs(change.before)
    ]
    found += [
        str(change)
        for change in comparison.changes
        if change.name == "gap" and change.after > _GAP
    ]
    known = {_key(each): each for each in before.results}
    for each in after.results:
        old = known.get(_key(each), each)
        found += [
            f"{each.suite} {each.case}: has {name} in one file only"
            for name in sorted(old.values.keys() ^ each.values.keys())
        ]
        if old.note != each.note:
            found.append(f"{each.suite} {each.case}: {old.note!r} -> {each.note!r}")
    return found


def _rounded(result: Result) -> dict[str, float]:
    found = dict(result.values)
    if "gap" in found:
        found["gap"] = round(found["gap"], _GAP_DIGITS)
    return found


def _key(result: Result) -> tuple[str, str]:
    return result.suite, result.case


def main() -> None:
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    before = ResultFile.load(FILE) if FILE.exists() else None
    after = measured()
    for line in differences(before, after) if before else ():
        print(line)
    after.save(FILE)
    print(f"written to {FILE}")


if __name__ == "__main__":
    main()
