"""The six constants of the published machine that are fitted, and their cluster.

All else is the preset's: peak rates, bandwidths, latencies (`clusters/V100.toml`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autopar.clusters.cluster import Cluster

FILE = Path(__file__).with_name("v100.json")
_SIZES = tuple(3.36e7 * 8**step for step in range(7))  # flops of products
_TILE, _PAIR = 128, 2  # side of a tile of a product; flops of a multiply-add


@dataclass(frozen=True)
class Constants:
    """What devices and links reach of their line rates, and compilers save.

    Attributes:
      product_efficiency: fraction of the peak flop/s that large products reach.
      half_tiles: 128 x 128 tiles of a product that reaches half of that: the last wave
        of tiles leaves part of the chip idle.
      fused_fraction: part of the bytes of fused operators that reaches the memory.
      kernel_seconds: of starting a kernel.
      host_efficiency: fraction of the bandwidth of links inside a host.
      network_efficiency: fraction of the bandwidth of the hosts' network.
    """

    product_efficiency: float
    half_tiles: float
    fused_fraction: float
    kernel_seconds: float
    host_efficiency: float
    network_efficiency: float

    @classmethod
    def load(cls, path: Path = FILE) -> Constants:
        """The fitted constants; `benchmarks.published_tables --fit` writes them."""
        return cls(**json.loads(path.read_text())["constants"])

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with these constants in place of its own."""
        curve = tuple(
            (size, self._reached(size) * self.product_efficiency) for size in _SIZES
        )
        device = replace(
            cluster.device,
            flops_efficiency=self.product_efficiency,
            efficiency={name: curve for name in cluster.device.peak_flops},
        )
        return replace(
            cluster,
            device=device,
            kernel_seconds=self.kernel_seconds,
            host_link=replace(cluster.host_link, efficiency=self.host_efficiency),
            network_link=replace(
                cluster.network_link, efficiency=self.network_efficiency
            ),
        )

    def _reached(self, flops: float) -> float:
        tiles = ((flops / _PAIR) ** (1 / 3) / _TILE) ** 2
        return tiles / (tiles + self.half_tiles)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
