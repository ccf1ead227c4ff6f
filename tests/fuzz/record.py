"""What a run of the fuzzer has covered: counts, rules and strategies reached.

A rule is reached when an operator that it is for was in a program that was compiled,
run and compared. A strategy is counted by the names of rule and factor, not by operator
or shape (`dot_general:k0`, `add:d3`, `sin:-` for everything whole). It is possible when
the rule offered it to some operator of such a program, and reached when one ran with it
along a mesh axis of at least two devices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from autopar.rules.base import registered_kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.recipes import UNREACHABLE

_CACHE = Path(__file__).parents[2] / ".pytest_cache"
RECORDS, HUNTED = _CACHE / "fuzz.jsonl", _CACHE / "hunt.jsonl"
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

    def lose(self) -> None:
        """A program that the process died of."""
        self.counts["programs"] += 1
        self.counts["crashed"] += 1

    def missing(self) -> frozenset[str]:
        """Rules of which something is not reached."""
        never = registered_kinds() - {rule for rule, _ in self.seen}
        partly = {rule for rule, _ in self.seen - self.reached}
        return frozenset((never | partly) - UNREACHABLE.keys())

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
        data = (json.dumps(line) + "\n").encode()
        with path.open("ab", buffering=0) as file:  # whole, whoever else appends
            file.write(data)

    def merge(self, other: Record) -> None:
        """Add what another run covered."""
        self.counts.update(other.counts)
        self.reached |= other.reached
        self.seen |= other.seen
        self.fallbacks.update(other.fallbacks)
        self.refusals.update(other.refusals)
        self.elapsed += other.elapsed

    @classmethod
    def load(cls, path: Path) -> Record:
        """All lines of a file as one record."""
        whole = cls()
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            part = cls()
            part.counts.update(line["counts"])
            part.reached, part.seen = _pairs(line["reached"]), _pairs(line["seen"])
            part.fallbacks.update(line["fallbacks"])
            part.refusals.update(line["refusals"])
            part.elapsed = line["elapsed"]
            whole.merge(part)
        return whole

    def __str__(self) -> str:
        rules = registered_kinds()
        used = {kind for kind, _ in self.seen} & rules
        absent = ", ".join(f"{k} ({UNREACHABLE[k]})" for k in sorted(UNREACHABLE))
        missing = ", ".join(sorted(rules - used - UNREACHABLE.keys()))
        possible = {(kind, name) for kind, name in self.seen if kind in rules}
        reached = possible & self.reached
        unreached = ", ".join(f"{k}:{n}" for k, n in sorted(possible - reached))
        percent = 100 * len(reached) / max(1, len(possible))
        names = ("programs", "right", "unstable", "refused")
        counts = [f"{self.counts[name]} {name}" for name in names]
        rate = self.counts["programs"] / self.elapsed if self.elapsed else 0.0
        lines = [
            f"fuzz: {', '.join(counts)}; {rate:.2f} programs a second a process",
            f"  wrong {self.counts['wrong']}, audit mismatches "
            f"{self.counts['audit mismatches']}, crashed {self.counts['crashed']} "
            f"(each must be 0)",
            f"  rules reached (an operator of theirs ran): {len(used)} of "
            f"{len(rules - UNREACHABLE.keys())}; not: {missing or '-'}; "
            f"cannot be: {absent or '-'}",
            f"  strategies reached (rule:factor; ran along two devices or more): "
            f"{len(reached)} of {len(possible)} that those rules offered, "
            f"{percent:.1f}%; not: {unreached or '-'}",
            f"  computed whole for lack of a rule: {_words(self.fallbacks)}",
            f"  refused: {_words(self.refusals)}",
        ]
        return "\n".join(lines)


def _pairs(items: Iterable[list[str]]) -> _Pairs:
    return {(kind, name) for kind, name in items}


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}x" for name, count in counts.most_common()) or "-"
