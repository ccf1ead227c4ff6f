"""Random programs under random plans give what one device gives, as their plans say.

`make test` runs the same few programs every time: those of the first seeds. `make fuzz
N=...` draws N fresh ones, led to what was not reached before, and reports what was.
"""

import os
from time import perf_counter

import pytest

from tests.fuzz.generate import TOPICS
from tests.fuzz.record import RECORDS, Record
from tests.fuzz.session import FAILURES, run_topic
from tests.fuzz.trial import Failure, run_trial

IS_LONG = "AUTOPAR_FUZZ_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("AUTOPAR_FUZZ_EXAMPLES", "30"))
EACH = -(-EXAMPLES // len(TOPICS))

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.filterwarnings("ignore"),  # of what JAX warns about random programs
]


@pytest.mark.parametrize("topic", TOPICS)
def test_programs_are_right_under_random_plans(topic: str) -> None:
    failures = run_topic(topic, EACH) if IS_LONG else run_first(topic)
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


def run_first(topic: str) -> list[str]:
    """The programs of the first seeds, up to one that fails."""
    record, start = Record(), perf_counter()
    try:
        for seed in range(EACH):
            run_trial(seed, topic, record, None)
    except Failure as failure:
        failure.keep(FAILURES)  # its reduction may take the process down
        return [str(failure)]
    finally:
        record.elapsed = perf_counter() - start
        record.save(RECORDS)
    return []
