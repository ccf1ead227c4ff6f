"""What collectives took on links: of known ones from a file, of others as measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..sharding.collective import CollectiveKind
from .hardware import Link

_FILE = Path(__file__).parent / "measured_links.csv"


@dataclass(frozen=True)
class Timing:
    """Seconds of one collective of a tensor of some bytes, whole, on each device."""

    kind: CollectiveKind
    group_size: int
    whole_bytes: float
    seconds: float


def measured_on(link_name: str) -> Mapping[str, Mapping[int, Any]]:
    """What was measured on a link, as `Link.measured`; nothing on most."""
    return _known().get(link_name, {})


def as_measured(timings: Iterable[Timing], link: Link) -> Link:
    """A link with what was measured; a message is half an exchange of pairs."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for each in sorted(timings, key=lambda each: each.whole_bytes):
        pairs = found.setdefault(each.kind, {}).setdefault(each.group_size, [])
        least = pairs[-1][1] if pairs else 0.0  # noise makes no larger one quicker
        pairs.append((each.whole_bytes, float(f"{max(each.seconds, least):.4g}")))
    (low, first), *_, (high, last) = min(found["collective_permute"].items())[1]
    bandwidth = (high - low) / max(last - first, 1e-3 * last)
    return replace(
        link,
        alpha_seconds=first,
        bandwidth=float(f"{bandwidth:.4g}"),
        efficiency=1.0,
        measured=found,
    )


def with_group_sizes(table: Mapping[str, Any]) -> dict[str, Any]:
    """A link's table as a file gives it, whose group sizes are strings."""
    measured = table.get("measured", {})
    if isinstance(measured, Mapping) and measured:
        measured = {
            kind: {int(size): pairs for size, pairs in by_group.items()}
            for kind, by_group in measured.items()
        }
    return {**table, "measured": measured}


@cache
def _known() -> Mapping[str, Mapping[str, Mapping[int, Any]]]:
    with _FILE.open() as file:
        head, *rows = csv.reader(line for line in file if not line.startswith("#"))
    sizes = [float(size) for size in head[3:]]
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for link, kind, group, *times in rows:
        seconds = [1e-6 * float(each) for each in times]
        pairs = list(zip(sizes, seconds, strict=True))
        found.setdefault(link, {}).setdefault(kind, {})[int(group)] = pairs
    return found
