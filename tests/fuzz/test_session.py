"""A worker that dies loses one program, which is kept, and not the topic."""

from pathlib import Path

import pytest

from tests.fuzz import session
from tests.fuzz.record import Record
from tests.fuzz.session import FOUND_FAILURES, Journal, run_topic
from tests.fuzz.trial import ON_ONE_DEVICE

ABORTED, SIGNAL = -6, "Fatal: aborted"


class Workers:
    """Stands for the processes: each runs all it is to, or dies as it was told."""

    def __init__(self, *deaths: tuple[int, int], says: str = "") -> None:
        self.deaths, self.counts, self.says = list(deaths), list[int](), says

    def __call__(self, topic: str, count: int, journal: Journal, output: Path) -> int:
        self.counts.append(count)
        number, status = self.deaths.pop(0) if self.deaths else (count, 0)
        for left in range(count, count - number, -1):
            journal.write(left, f"{self.says}program {left} of {topic}")
        output.write_text(SIGNAL)
        return status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "FAILURES", tmp_path / "failures.txt")
    monkeypatch.setattr(session, "RECORDS", tmp_path / "records.jsonl")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, workers: Workers, count: int) -> list[str]:
    monkeypatch.setattr(session, "_run_worker", workers)
    return run_topic("shapes", count)


def test_nothing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Workers(), 10) == []
    assert not list(folder.iterdir())


def test_the_rest_is_run_after_deaths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers((3, ABORTED), (1, ABORTED))
    failures = run(monkeypatch, workers, 10)
    assert workers.counts == [10, 7, 6]
    assert ["program 8 of" in failures[0], "program 7 of" in failures[1]] == [True] * 2
    assert all(SIGNAL in failure for failure in failures)
    kept = (folder / "failures.txt").read_text()
    assert kept.count("exit status -6") == len(failures) == 2
    counts = Record.load(folder / "records.jsonl").counts
    assert counts["crashed"] == counts["programs"] == 2


def test_what_plain_jax_dies_of_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers((3, ABORTED), says=ON_ONE_DEVICE)
    assert run(monkeypatch, workers, 10) == []
    assert workers.counts == [10, 7]
    counts = Record.load(folder / "records.jsonl").counts
    assert counts["refused"] == counts["programs"] == 1
    assert not (folder / "failures.txt").exists()


def test_failures_of_a_worker_that_ends_are_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers((10, FOUND_FAILURES))
    assert run(monkeypatch, workers, 10) == [SIGNAL]
    assert workers.counts == [10]
    assert not list(folder.iterdir())


def test_a_worker_that_cannot_start_is_not_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers((0, 1))
    assert run(monkeypatch, workers, 10) == [SIGNAL]
    assert workers.counts == [10]


def test_a_worker_runs_programs(folder: Path) -> None:
    """In a process of its own, for real; it adds to the record that all share."""
    assert run_topic("values", 1) == []
