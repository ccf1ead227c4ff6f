"""The suites of `autopar bench`: each is a row of cases, small ones take seconds.

Suites run in this process, on virtual devices unless real ones are asked for; only
`ray` does not, whose driver and hosts are processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.models.names import look_up
from benchmarks.planning_suites import TABLES as TABLES
from benchmarks.planning_suites import plan_suite, quality_suite, simulate_suite
from benchmarks.request import Case, Request
from benchmarks.results import Result
from benchmarks.running_suites import pipeline_suite, ray_suite, step_suite

Suite = Callable[[Request], Iterator[Case]]

SUITES: dict[str, Suite] = {
    "plan": plan_suite,
    "quality": quality_suite,
    "step": step_suite,
    "simulate": simulate_suite,
    "pipeline": pipeline_suite,
    "ray": ray_suite,
}


@dataclass(frozen=True)
class Listener:
    """Who is told how far a run is; by default nobody.

    Attributes:
      starts: gets the suite, the case, its number from 1 and how many there are.
      finds: gets each result as it comes.
      ends: gets all results of a suite behind its last case, or where it was stopped.
    """

    starts: Callable[[str, str, int, int], None] = lambda *_: None
    finds: Callable[[Result], None] = lambda _: None
    ends: Callable[[str, Sequence[Result]], None] = lambda *_: None


def run(
    suites: Sequence[str], request: Request, listener: Listener | None = None
) -> Iterator[Result]:
    """The results of some suites, as they come.

    A case of several that fails gives a result that says so, and the others run.

    Raises:
      ValueError: an unknown suite, with the nearest name.
      Exception: whatever the only case raised.
    """
    listener = listener or Listener()
    chosen = {name: look_up("suite", name, SUITES) for name in suites}
    # The cases are few and cheap to list: what one takes is in `measure`.
    cases = {name: list(suite(request)) for name, suite in chosen.items()}
    is_single = len(list(chain(*cases.values()))) == 1
    for suite, each in cases.items():
        found: list[Result] = []
        try:
            for number, case in enumerate(each, 1):
                listener.starts(suite, case.name, number, len(each))
                for result in _results(suite, case, is_single):
                    found.append(result)
                    listener.finds(result)
                    yield result
        finally:
            listener.ends(suite, found)


def _results(suite: str, case: Case, is_single: bool) -> Iterator[Result]:
    try:
        yield from case.measure()
    except Exception as error:
        if is_single:
            raise
        told = f"{type(error).__name__}: {error}"
        yield Result(suite, case.name, failure=told)
