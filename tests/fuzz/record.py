"""What a run of the fuzzer has covered: counts, rules and strategies reached."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from autopar.rules.base import registered_kinds
from tests.fuzz.oracle import Outcome

RECORDS = Path(__file__).parents[2] / ".pytest_cache" / "fuzz.jsonl"
_Pairs = set[tuple[str, str]]


class Record:
    """Adds up outcomes; `save` appends it to a file that `load` adds up."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reached: _Pairs = set()
        self.seen: _Pairs = set()
        self.fallbacks: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.elapsed = 0.0

    def add(self, outcome: Outcome) -> None:
        self.counts["programs"] += 1
        self.counts[outcome.verdict] += 1
        self.reached |= outcome.reached
        self.seen |= outcome.seen
        self.fallbacks.update(outcome.fallbacks)

    def refuse(self, reason: str) -> None:
        self.counts["programs"] += 1
        self.counts["refused"] += 1
        self.refusals[reason[:60]] += 1

    def fail(self, error: Exception) -> None:
        self.counts["programs"] += 1
        text = str(error)
        kind = "audit mismatches" if text.startswith("the audit") else "wrong"
        is_ours = type(error).__name__ == "WrongProgram"
        self.counts[kind if is_ours else "crashed"] += 1

    def save(self, path: Path) -> None:
        """Append one line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        line = {
            "counts": self.counts,
            "reached": sorted(self.reached),
            "seen": sorted(self.seen),
            "fallbacks": self.fallbacks,
            "refusals": self.refusals,
            "elapsed": self.elapsed,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """All lines of a file as one record."""
        whole = cls()
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            whole.counts.update(line["counts"])
            whole.reached |= _pairs(line["reached"])
            whole.seen |= _pairs(line["seen"])
            whole.fallbacks.update(line["fallbacks"])
            whole.refusals.update(line["refusals"])
            whole.elapsed += line["elapsed"]
        return whole

    def __str__(self) -> str:
        rules = registered_kinds()
        used = {kind for kind, _ in self.seen} & rules
        missing = ", ".join(sorted(rules - used))
        unreached = ", ".join(f"{k}:{n}" for k, n in sorted(self.seen - self.reached))
        names = ("programs", "right", "unstable", "refused")
        counts = [f"{self.counts[name]} {name}" for name in names]
        rate = self.counts["programs"] / self.elapsed if self.elapsed else 0.0
        lines = [
            f"fuzz: {', '.join(counts)}; {rate:.2f} programs a second a process",
            f"  wrong {self.counts['wrong']}, audit mismatches "
            f"{self.counts['audit mismatches']}, crashed {self.counts['crashed']} "
            f"(each must be 0)",
            f"  rules reached: {len(used)} of {len(rules)}; not: {missing or '-'}",
            f"  strategies reached: {len(self.reached)} of {len(self.seen)} possible; "
            f"not: {unreached or '-'}",
            f"  computed whole for lack of a rule: {_words(self.fallbacks)}",
            f"  refused: {_words(self.refusals)}",
        ]
        return "\n".join(lines)


def _pairs(items: Iterable[list[str]]) -> _Pairs:
    return {(kind, name) for kind, name in items}


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}x" for name, count in counts.most_common()) or "-"
