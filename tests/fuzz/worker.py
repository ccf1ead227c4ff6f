"""Runs fresh programs of a topic: `python -m tests.fuzz.worker TOPIC COUNT JOURNAL`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from time import perf_counter

from tests import conftest

assert conftest  # imported before jax, which reads its environment once

import jax  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.fuzz.record import RECORDS, Record  # noqa: E402
from tests.fuzz.session import FAILURES, FOUND_FAILURES, Journal  # noqa: E402
from tests.fuzz.trial import Failure, run_trial  # noqa: E402

_EVERY = 25  # programs from one clearing of JAX's caches to the next


def main(topic: str, count: int, journal: Journal) -> int:
    """Run programs, and print the first of each kind of failure, reduced."""
    jax.config.update("jax_enable_compilation_cache", False)  # no program comes twice
    covered, known, left = Record.load(RECORDS), set[str](), count

    def begin(text: str) -> None:
        journal.write(left, text)

    def show(failure: Failure) -> None:
        name = f"{type(failure.__cause__).__name__}: {failure.__cause__}"[:30]
        if name not in known:
            known.add(name)
            print(failure, flush=True)

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
        deadline=None,
        database=None,
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        nonlocal left
        record, start = Record(), perf_counter()
        try:
            run_trial(seed, topic, record, covered, begin)
        except Failure as failure:
            failure.keep(FAILURES)  # its reduction may take the process down
            show(failure)
        record.elapsed = perf_counter() - start
        record.save(RECORDS)
        left -= 1
        if left % _EVERY == 0:
            jax.clear_caches()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    return FOUND_FAILURES if known else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Journal(Path(sys.argv[3]))))
