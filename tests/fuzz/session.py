"""Long runs of one topic, each in a process of its own, which XLA may end.

A worker writes down every program before it runs it. Where it dies, that program is
kept as a failure, unless plain JAX dies of it, and another worker goes on with the rest
of the topic.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import time

from tests.fuzz.record import RECORDS, Record
from tests.fuzz.trial import ON_ONE_DEVICE, keep

FAILURES = RECORDS.with_name("fuzz_failures.txt")
FOUND_FAILURES = 3  # exit status of a worker that ran all of its programs
_ROOT = Path(__file__).parents[2]
_STALLED = 900.0  # seconds that one program may take, its reduction included
_SHOWN = 4000  # characters of what a worker said last


@dataclass(frozen=True)
class Journal:
    """A file with how many programs are still to be run, and the one that is."""

    path: Path

    def write(self, left: int, text: str) -> None:
        """`left` counts the program that is run."""
        self.path.write_text(f"{left}\n{text}")

    def read(self) -> tuple[int, str]:
        """How many are left, and the program, empty before the first."""
        left, _, text = self.path.read_text().partition("\n")
        return int(left), text

    def age(self) -> float:
        """Seconds since a program was begun."""
        return time() - self.path.stat().st_mtime


def run_topic(topic: str, count: int) -> list[str]:
    """Run `count` fresh programs; the failures, each kept in `FAILURES` too."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        journal, output = Journal(Path(folder, "journal")), Path(folder, "output")
        while count:
            journal.write(count, "")
            status = _run_worker(topic, count, journal, output)
            if status == 0:
                break
            said = output.read_text(errors="replace")[-_SHOWN:]
            count, text = journal.read()
            if status == FOUND_FAILURES or not text:
                failures.append(said)
                break
            ended = Record()
            if text.startswith(ON_ONE_DEVICE):
                ended.refuse("XLA on one device: the process died")
            else:
                error = f"the process died with exit status {status}"
                keep(FAILURES, error, text)
                failures.append(f"{error}\n{text}\n{said}")
                ended.lose()
            ended.save(RECORDS)
            count -= 1
    return failures


def _run_worker(topic: str, count: int, journal: Journal, output: Path) -> int:
    """The exit status of a worker that runs `count` programs, or dies of one."""
    module, arguments = "tests.fuzz.worker", (topic, str(count), str(journal.path))
    with output.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=_ROOT,
            stdout=file,
            stderr=file,
        )
        try:
            while True:
                try:
                    return worker.wait(timeout=5.0)
                except subprocess.TimeoutExpired:
                    if journal.age() > _STALLED:
                        worker.kill()
        finally:
            worker.kill()
