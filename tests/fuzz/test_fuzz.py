"""Random programs under random plans give what one device gives, as their plans say.

`make test` runs the same few programs every time: those of the first seeds. `make fuzz
N=...` draws N fresh ones, led to what was not reached before, and reports what was.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter

import jax
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.generate import TOPICS
from tests.fuzz.record import RECORDS, Record
from tests.fuzz.trial import Failure, run_trial

IS_LONG = "AUTOPAR_FUZZ_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("AUTOPAR_FUZZ_EXAMPLES", "60"))
EACH = -(-EXAMPLES // len(TOPICS))
COVERED = Record()  # what no program need look for any more

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.filterwarnings("ignore"),  # of what JAX warns about random programs
]


@pytest.fixture
def record() -> Iterator[Record]:
    """What one test covers, added to the others' when it ends."""
    found, start = Record(), perf_counter()
    if IS_LONG:  # no program comes twice
        jax.config.update("jax_enable_compilation_cache", False)
        COVERED.merge(Record.load(RECORDS))  # of other processes too
    yield found
    found.elapsed = perf_counter() - start
    found.save(RECORDS)
    jax.config.update("jax_enable_compilation_cache", True)


FAILURES = RECORDS.with_name("fuzz_failures.txt")


def first_seeds(test: Callable[..., None]) -> Callable[..., None]:
    """The examples of every short run, whatever the release of hypothesis."""
    for seed in range(EACH):
        test = example(seed=seed)(test)
    return test


@pytest.mark.parametrize("topic", TOPICS)
def test_programs_are_right_under_random_plans(topic: str, record: Record) -> None:
    failures: dict[int, str] = {}

    @settings(
        max_examples=EACH,
        phases=[Phase.generate if IS_LONG else Phase.explicit],
        suppress_health_check=[HealthCheck.too_slow],
        report_multiple_bugs=False,  # reduce.py shrinks, as it knows programs better
    )
    @first_seeds
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        if seed in failures:  # hypothesis repeats it for its own report
            pytest.fail(failures[seed], pytrace=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_trial(seed, topic, record, COVERED if IS_LONG else None)
        except Failure as failure:
            failure.keep(FAILURES)  # its reduction may take the process down
            failures[seed] = str(failure)
            pytest.fail(failures[seed], pytrace=False)

    check()
