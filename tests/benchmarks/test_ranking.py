"""Pairs of published plans, and whether the quicker one is predicted to be so."""

from dataclasses import replace

import pytest

from benchmarks.published.runs import Run, read_runs
from benchmarks.ranking import Pair, pairs_of, share_right
from benchmarks.suites import TABLES


def run(published: float, predicted: float, release: str = "", **config: str) -> Run:
    first = read_runs(TABLES / "torchtitan_llama.csv")[0]
    made = replace(first, published=published, release=release, config=config)
    vars(made)["predicted"] = predicted
    return made


def names_of(*runs: Run) -> int:
    return len(list(pairs_of(runs)))


def test_pairs_differ_in_a_plan_and_by_more_than_five_percent() -> None:
    slow, quick = run(100, 90, tp="1"), run(120, 95, tp="2")
    (pair,) = pairs_of([slow, quick])
    assert pair.is_right and pair.published_ratio == pytest.approx(100 / 120)
    assert names_of(slow, run(104, 95, tp="2")) == 0
    assert names_of(slow, run(120, 95, tp="")) == 0, "blank is no difference"
    assert names_of(slow, replace(quick, group=("another",))) == 0


def test_releases_are_the_same_or_the_next() -> None:
    first, second, third = (
        run(100 + 20 * n, 100, release, tp=str(n))
        for n, release in enumerate(("25.11", "26.02", "26.02.01"))
    )
    assert names_of(first, second, third) == 2


def test_confusing_what_is_twice_as_quick_costs_more() -> None:
    pairs = [Pair("a", 2.0, 0.9), Pair("b", 1.1, 1.01)]
    assert share_right(pairs) == pytest.approx(0.0953 / (0.0953 + 0.6931), rel=1e-3)


@pytest.mark.slow
def test_decoders_are_ranked_as_published() -> None:
    for table in ("torchtitan_llama", "alpa_osdi22_moe"):
        assert share_right(pairs_of(read_runs(TABLES / f"{table}.csv"))) >= 0.85
