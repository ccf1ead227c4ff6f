"""Runs many seeds and reduces what fails: `python -m tests.fuzz.hunt FIRST LAST`.

The environment of `tests/conftest.py` is set first: eight virtual CPU devices.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from time import perf_counter

from tests import conftest

assert conftest  # imported before jax, which reads its environment once

from tests.fuzz.cases import draw_case  # noqa: E402
from tests.fuzz.generate import TOPICS, draw_program  # noqa: E402
from tests.fuzz.oracle import check_case, reference_of  # noqa: E402
from tests.fuzz.record import Record  # noqa: E402
from tests.fuzz.reduce import reduced, report_of  # noqa: E402


def main(first: int, last: int) -> None:
    warnings.simplefilter("ignore")
    start, known = perf_counter(), set[str]()
    record = Record()
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
            print(f"\n===== seed {seed} fails on {case}: {str(error)[:150]}")
            name = f"{type(error).__name__}: {str(error)}"[:50]
            if name not in known:
                known.add(name)
                print("".join(traceback.format_tb(error.__traceback__)[-3:])[-1500:])
                print(report_of(*reduced(program, case, seconds=60.0)))
        if record.counts["programs"] % 50 == 0 or seed == last - 1:
            record.elapsed = perf_counter() - start
            print(record, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
