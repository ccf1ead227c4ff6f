"""Runs many seeds and reduces what fails: `python -m tests.fuzz.hunt FIRST LAST`.

A failing program loses every line that it fails without, and prints as a function. The
environment of `tests/conftest.py` is set first: eight virtual CPU devices.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from dataclasses import replace
from time import perf_counter

from tests import conftest

assert conftest  # imported before jax, which reads its environment once

from tests.fuzz.cases import draw_case  # noqa: E402
from tests.fuzz.generate import TOPICS, draw_program  # noqa: E402
from tests.fuzz.oracle import check_case, reference_of  # noqa: E402
from tests.fuzz.plans import Case  # noqa: E402
from tests.fuzz.programs import Program, without_line  # noqa: E402
from tests.fuzz.record import Record  # noqa: E402


_SAME = 30  # failures whose texts begin alike are taken for one


def failure_of(program: Program, case: Case) -> str:
    """One line for the error, or nothing if the program is right or refused."""
    try:
        check_case(reference_of(program), case)
    except NotImplementedError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def reduced(program: Program, case: Case, seconds: float = 90.0) -> tuple[Program, Case]:
    """A program of fewer lines that fails too, under any of a few plans."""
    start, name = perf_counter(), failure_of(program, case)[:_SAME]
    cases = [case, *(Case(case.mesh, "uniform", seed) for seed in range(4))]
    shrinks = True
    while shrinks and perf_counter() - start < seconds:
        shrinks = False
        for smaller in _smaller(program):
            for each in cases:
                if failure_of(smaller, each)[:_SAME] == name:
                    program, case, shrinks = smaller, each, True
                    break
            if shrinks or perf_counter() - start > seconds:
                break
    return program, case


def _smaller(program: Program) -> list[Program]:
    found = [replace(program, gradient=())] if program.gradient else []
    for index in reversed(range(len(program.lines))):
        found.append(without_line(program, index))
    for index in range(len(program.results)):
        rest = program.results[:index] + program.results[index + 1 :]
        found.append(replace(program, results=rest) if rest else None)
    last = [line for line in program.lines for _ in line.results]
    if last:
        shorter = replace(program, lines=program.lines[:-1])
        made = tuple(last[-1].operands)
        found.append(replace(shorter, results=made) if made else None)
    return [each for each in found if each is not None]


def main(first: int, last: int) -> None:
    warnings.simplefilter("ignore")
    start = perf_counter()
    record, known = Record(), set[str]()
    for seed in range(first, last):
        draw = random.Random(seed)
        program = draw_program(draw, TOPICS[seed % len(TOPICS)])
        case = draw_case(draw)
        try:
            record.add(check_case(reference_of(program), case))
        except NotImplementedError as error:
            record.refuse(str(error))
        except Exception as error:
            record.fail(error)
            print(f"\n===== seed {seed} fails on {case}: {str(error)[:300]}")
            name = f"{type(error).__name__}: {str(error)}"[:60]
            if name not in known:
                known.add(name)
                print("".join(traceback.format_tb(error.__traceback__)[-3:])[-1500:])
                smaller, case = reduced(program, case)
                print(f"reduced, on {case}\n{smaller}\n{failure_of(smaller, case)}")
            sys.stdout.flush()
    print(record.seconds(perf_counter() - start))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
