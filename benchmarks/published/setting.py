"""What the head of a published table says of all its rows: machine, sizes, system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from autopar.clusters.cluster import Cluster
from benchmarks.published.machines import known_machine, table_of
from benchmarks.published.simulator import Machine

_KIND = r"(?:TPU[ -]?)?([A-Za-z]+\d+[a-z]?)"
_DEVICES = re.compile(
    rf"\b(\d+)\s*x\s*(?:NVIDIA )?{_KIND}(?:[- ](?:SXM\d?|PCIe))?(?:[- ](\d+) ?GB)?\b"
)
_NAMED = re.compile(r"\b(?:[AHVPBL]\d{2,3}|v\d[ep]|TPU)\b")
_BANDWIDTH = re.compile(
    r"\b(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(Gbps|Gb/s|Gbit/s|GB/s)\s+"
    r"(?:(?!NVLink)\w+ ){0,2}"
    r"(?:(?:between|across|per|a|each|of each) (?:host|node|machine|server)|network)"
)
_GIBIBYTE = 2**30


@dataclass(frozen=True)
class Setting:
    """What the head of a file says of all rows; what it leaves out is as Alpa's GPTs.

    `kind` is the name of a preset. `host_bandwidth` is of all network cards of a host
    in bytes/s, the preset's where it is None. `system` is that of columns that name
    none; `is_interleaved` says that pipelines of published shapes are.
    """

    kind: str = "V100"
    memory_bytes: int = 16 * _GIBIBYTE
    devices_per_host: int = 8
    host_bandwidth: float | None = None
    seq_len: int = 1024
    vocab_size: int = 51200
    batch_size: int = 1024
    heads: int = 16
    mlp_ratio: int = 4
    group_size: int = 2048
    image_size: int = 224
    num_classes: int = 1024
    system: str = ""
    is_interleaved: bool = False

    @cached_property
    def machine(self) -> Machine:
        """The preset, with the head's memory and network, and what is known besides."""
        return known_machine(
            *(self.kind, self.devices_per_host, self.memory_bytes, self.host_bandwidth)
        )


def read_setting(text: str) -> Setting:
    """The setting that the comment lines of a table describe.

    A machine is the devices of a host and their kind: `8x V100-16GB`, `4x H100`,
    `4x TPU v5p`. Its network is `25 Gbps between hosts` or `8x 200 Gb/s between hosts`.

    Raises:
      ValueError: a machine that is not written so, or of a kind that has no preset.
    """
    found: dict[str, Any] = {"is_interleaved": "interleaved" in text.lower()}
    for name, pattern in table_of("columns")["head"].items():
        if match := re.search(pattern, text):
            found[name] = int(match.group(1).replace(",", ""))
    if system := re.search(r"\bsystem[ :=]+([\w-]+)", text):
        found["system"] = system.group(1).lower().replace("-", "_")
    if network := _BANDWIDTH.search(text):
        cards, number, unit = network.groups()
        bits = 1 if unit == "GB/s" else 8
        found["host_bandwidth"] = int(cards or 1) * float(number) * 1e9 / bits
    device, other = _DEVICES.search(text), _NAMED.search(text)
    if device is None and other is not None:
        raise ValueError(
            f"the head of a published table names its machine as '8x V100-16GB', the "
            f"devices of a host and the memory of each, but says {other.group()!r} "
            f"otherwise."
        )
    if device is not None:
        count, kind, memory = device.groups()
        preset = _preset(kind, memory)
        size = int(memory) * _GIBIBYTE if memory else preset.device.memory_bytes
        found |= {"kind": preset.name, "memory_bytes": size}
        found["devices_per_host"] = int(count)
    return Setting(**found)


@lru_cache
def _preset(kind: str, memory: str | None) -> Cluster:
    """The preset of a kind, of the variant with that memory if there is one.

    Raises:
      ValueError: no preset has that name; the text names those there are.
    """
    try:
        return Cluster.preset(f"{kind}-{memory}GB")
    except ValueError:
        return Cluster.preset(kind)
