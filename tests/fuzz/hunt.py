"""Runs many seeds and reduces what fails: `python -m tests.fuzz.hunt FIRST LAST`.

It looks for what earlier runs have not reached, adds to their record, and prints it.
The environment of `tests/conftest.py` is set first: eight virtual CPU devices.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from time import perf_counter

from tests import conftest

assert conftest  # imported before jax, which reads its environment once

import jax  # noqa: E402

from tests.fuzz.generate import TOPICS  # noqa: E402
from tests.fuzz.record import HUNTED, Record  # noqa: E402
from tests.fuzz.trial import Failure, run_trial  # noqa: E402

_EVERY = 25  # programs from one line of the record to the next


def main(first: int, last: int, path: Path = HUNTED) -> None:
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_compilation_cache", False)  # no program comes twice
    known = set[str]()
    covered, record, start = Record.load(path), Record(), perf_counter()
    for seed in range(first, last):
        print(seed, end=" ", flush=True)  # XLA may end the process
        try:
            run_trial(seed, TOPICS[seed % len(TOPICS)], record, covered)
        except Failure as failure:
            _show(seed, failure, known)
        if (seed + 1 - first) % _EVERY == 0 or seed == last - 1:
            record.elapsed = perf_counter() - start
            record.save(path)
            record, start = Record(), perf_counter()
            jax.clear_caches()
            print(Record.load(path), flush=True)


def _show(seed: int, failure: Failure, known: set[str]) -> None:
    """One line; the whole of it if it is not like any before."""
    error = failure.__cause__
    print(f"\n===== seed {seed} fails on {failure.case}: {str(error)[:150]}")
    name = f"{type(error).__name__}: {error}"[:50]
    if name in known or error is None:
        return
    known.add(name)
    print("".join(traceback.format_tb(error.__traceback__)[-3:])[-1500:])
    print(failure, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:]))
