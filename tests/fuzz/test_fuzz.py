"""Random programs under random plans give what one device gives, as their plans say.

`make fuzz N=...` draws N fresh programs, and reports what they reached.
"""

import os
import random
import warnings
from collections.abc import Iterator
from time import perf_counter

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import draw_case
from tests.fuzz.generate import TOPICS, draw_program
from tests.fuzz.oracle import check_case, reference_of
from tests.fuzz.record import RECORDS, Record
from tests.fuzz.reduce import reduced, report_of

IS_LONG = "AUTOPAR_FUZZ_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("AUTOPAR_FUZZ_EXAMPLES", "60"))
REDUCE_SECONDS = 60.0

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
    yield found
    found.elapsed = perf_counter() - start
    found.save(RECORDS)
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("topic", TOPICS)
def test_programs_are_right_under_random_plans(topic: str, record: Record) -> None:
    failures: dict[str, str] = {}

    @settings(
        max_examples=max(1, EXAMPLES // len(TOPICS)),
        phases=[Phase.explicit, Phase.generate],  # reduce.py knows programs better
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
        report_multiple_bugs=False,
    )
    @given(st.randoms(use_true_random=False))
    def check(draw: random.Random) -> None:
        program, case = draw_program(draw, topic), draw_case(draw)
        key = f"{program}\n{case}"
        if key in failures:  # hypothesis repeats it for its own report
            pytest.fail(failures[key], pytrace=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record.add(check_case(reference_of(program), case))
        except NotImplementedError as error:
            record.refuse(str(error))
        except Exception as error:
            record.fail(error)
            failures[key] = report_of(*reduced(program, case, REDUCE_SECONDS))
            pytest.fail(failures[key], pytrace=False)

    check()
