"""The three constants of the published machine that are fitted, and their cluster.

All else is the preset's: peak rates, bandwidths, latencies (`clusters/V100.toml`). Of a
machine that is not a V100 nothing was fitted, and all is the preset's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autopar.clusters.cluster import Cluster
from autopar.costs.compute import FUSED_FRACTION

FILE = Path(__file__).with_name("v100.json")
FITTED_KIND, FITTED_DTYPE = "V100", "float16"
# Products of 32 bits reach a seventh of 83 Tflop/s of 15.7 (Markidis et al., "NVIDIA
# Tensor Core Programmability, Performance & Precision", IPDPSW 2018, abstract).
_SINGLE_EFFICIENCY = 83 / 7 / 15.7
# Of 25 Gbit/s over TCP NCCL reaches 1.7 GB/s (NVIDIA/nccl-tests #83), 54%.
NETWORK_EFFICIENCY = 0.54
_GIVEN = "network_efficiency"
_TILE = 128  # side of a tile of a product


@dataclass(frozen=True)
class Constants:
    """What devices and links reach of their line rates, and compilers save.

    What is None is as the preset has it.

    Attributes:
      product_efficiency: fraction of the peak flop/s that large products of 16 bits
        reach; those of 32 bits are from a source, not fitted.
      half_tiles: 128 x 128 tiles of a product that reaches half of that: the last wave
        of tiles leaves part of the chip idle.
      fused_fraction: part of the bytes of fused operators that reaches the memory.
      network_efficiency: fraction of the bandwidth of the hosts' network: from a
        source, not fitted.
    """

    product_efficiency: float | None = None
    half_tiles: float | None = None
    fused_fraction: float = FUSED_FRACTION
    network_efficiency: float | None = None

    @classmethod
    def load(cls, path: Path = FILE) -> Constants:
        """The fitted constants; `benchmarks.published_tables --fit` writes them."""
        fitted = json.loads(path.read_text())["constants"]
        return cls(**fitted, network_efficiency=NETWORK_EFFICIENCY)

    @classmethod
    def of_kind(cls, kind: str) -> Constants:
        """The fitted constants of a V100, of anything else its preset's."""
        return cls.load() if kind == FITTED_KIND else cls()

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with these constants in place of its own."""
        device = cluster.device
        if self.product_efficiency is not None:
            own = {FITTED_DTYPE: self.product_efficiency, "float32": _SINGLE_EFFICIENCY}
            area = (self.half_tiles or 0.0) * _TILE**2
            device = replace(device, efficiency=own, product_area=area)
        found = replace(cluster, device=device)
        if self.network_efficiency is not None:
            link = replace(found.network_link, efficiency=self.network_efficiency)
            found = replace(found, network_link=link)
        return found

    def fitted(self) -> dict[str, float]:
        """Those that are fitted, by name."""
        return {name: each for name, each in asdict(self).items() if name != _GIVEN}
