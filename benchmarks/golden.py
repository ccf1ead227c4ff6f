"""What benchmarks give on any machine beside what it was: bytes, memory, gaps, errors.

All suites of `autopar bench all --small`; what is timed is left out. `make test-all`
compares all of it with `golden.json`, `make test` a case of each quick suite. Where a
change is meant to move numbers, write the file again and let the diff say which:

    python -m benchmarks.golden
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks import suites
from benchmarks.comparison import Change, compare
from benchmarks.request import Request
from benchmarks.results import Machine, Result, ResultFile

FILE = Path(__file__).with_name("golden.json")
_MACHINE = Machine("golden", "any", 0, "any", "0.10.2")
_TOLERANCE = 1e-3  # of values; libraries of other builds round differently
_COMPILED = "compiled_memory_bytes"  # XLA's, which pads for the processor it finds
_GAP, _GAP_DIGITS = 1e-3, 6
_SIZES = ("nodes", "choices", "edges")  # of problems: what may be chosen, not what is


def measured() -> ResultFile:
    """The suites' small cases on eight devices, nothing timed, no Ray cluster started.

    Raises:
      RuntimeError: a case failed.
    """
    request = Request(small=True, rounds=1, is_timed=False)
    return without_times(suites.run(tuple(suites.SUITES), request))


def without_times(results: Iterable[Result]) -> ResultFile:
    """What no clock tells; gaps are rounded: what is left of a closed one is noise.

    Raises:
      RuntimeError: a case failed.
    """
    kept = []
    for each in results:
        if each.failure:
            raise RuntimeError(f"Every case must succeed, but: {each}.")
        if each.values or not each.timed:
            kept.append(replace(each, values=_rounded(each), timed={}))
    return ResultFile(_MACHINE, tuple(kept))


def differences(before: ResultFile, after: ResultFile) -> list[str]:
    """What is not as it was, a line each: numbers, cases, and reasons of refusals.

    Bytes are as they were to the last one. A gap is solver time turned into rounding:
    it only has to stay small.
    """
    comparison = compare(before, after)
    found = [each for each in comparison.warnings if "file only" in each]
    found += [str(change) for change in comparison.changes if _has_moved(change)]
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


def _has_moved(change: Change) -> bool:
    if change.name == "gap":
        return change.after > _GAP
    is_exact = change.name.endswith("bytes") and change.name != _COMPILED
    tolerance = 0.0 if is_exact else _TOLERANCE
    return abs(change.after - change.before) > tolerance * abs(change.before)


def _rounded(result: Result) -> dict[str, float]:
    found = {name: x for name, x in result.values.items() if name not in _SIZES}
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
