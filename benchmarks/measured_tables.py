"""Collectives and matrix products as presets price them, beside measured tables.

The tables are XLA's own, of H100 and B200, as CSV files. Presets have every second size
of the collectives from 1 MiB on, so only the others are scored. `above` is the mean
error from 1 MiB on, `below` the median of how much quicker than measured smaller ones
are told. Of products all sizes are scored, beside one factor and the seconds of the
smallest, which is a launch: operands and power of the tables are not ours.

    python -m benchmarks.measured_tables --collectives FILE --products FILE
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

_PRESETS = {"sm_90": "H100", "sm_100_B200": "B200"}
_FROM = 1 << 20
_FITTED = range(10, 40, 2)  # powers of two


def collectives(path: Path) -> None:
    from autopar.clusters.cluster import Cluster
    from autopar.costs.collectives import collective_seconds
    from autopar.sharding.collective import COLLECTIVE_KINDS, CollectiveKind
    from autopar.sharding.mesh import MeshShape

    above: dict[tuple[str, str], list[float]] = defaultdict(list)
    below: dict[tuple[str, str], list[float]] = defaultdict(list)
    kinds: dict[str, CollectiveKind] = {}
    kinds.update({kind.replace("_", "-"): kind for kind in COLLECTIVE_KINDS})
    for row in _rows(path):
        kind, size = kinds[row["op"]], int(row["group_size"])
        if row["pattern"] in ("one_way", "two_way"):
            size = 2
        result = 4 * int(row["elements"])
        whole = result * (size if kind == "reduce_scatter" else 1)
        if whole.bit_length() - 1 in _FITTED:
            continue
        device = _PRESETS[row["device"]]
        link = Cluster.preset(f"1x8x{device}").link(MeshShape(("x",), (size,)), ("x",))
        measured = whole / float(row["throughput_bytes_per_s"])
        error = collective_seconds(kind, result, link) / measured - 1
        for key in ((device, kind), (device, "all")):
            if whole >= _FROM:
                above[key].append(abs(error))
            else:
                below[key].append(max(-error, 0.0))
    print("| device | collective | above | below |\n|---|---|---|---|")
    for key, errors in above.items():
        below_median = statistics.median(below[key])
        cells = f"{statistics.mean(errors):.1%} | {below_median:.1%}"
        print(f"| {key[0]} | {key[1]} | {cells} |")


def products(path: Path) -> None:
    from autopar.clusters.cluster import Cluster

    columns = {"bfloat16": "tflops bf16xbf16->bf16", "float32": "tflops f32xf32->f32"}
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(path):
        sizes = [int(row[name]) for name in "bmnk"]
        device = Cluster.preset(_PRESETS[row["device"]]).device
        for dtype, column in columns.items():
            measured = 2e-12 * prod(sizes) / float(row[column])
            told = device.product_seconds(dtype, *sizes)
            found[device.kind, dtype].append((told, measured))
    print("| device | dtype | factor | mean error beside it |\n|---|---|---|---|")
    for (device, dtype), pairs in found.items():
        start = min(measured for _, measured in pairs)
        factor = statistics.median((m - start) / t for t, m in pairs if m > 4 * start)
        errors = [abs((factor * t + start) / m - 1) for t, m in pairs]
        print(f"| {device} | {dtype} | {factor:.2f} | {statistics.mean(errors):.1%} |")


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--collectives", type=Path, help="CSV of measured collectives")
    parser.add_argument("--products", type=Path, help="CSV of measured products")
    asked = parser.parse_args()
    if asked.collectives:
        collectives(asked.collectives)
    if asked.products:
        products(asked.products)
    return 0


if __name__ == "__main__":
    sys.exit(main())
