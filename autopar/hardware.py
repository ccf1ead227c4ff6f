"""One device and one link: their speeds, checked, and what they reach of them."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8")


@dataclass(frozen=True)
class Device:
    """One accelerator, or one virtual CPU device.

    Attributes:
      kind: a short name, such as `H100`.
      memory_bytes: bytes that programs and their state may fill.
      peak_flops: flop/s of a large matrix product for each dtype; `float32` is needed
        and stands in for dtypes that are left out.
      memory_bandwidth: bytes/s between the device and its memory.
      flops_efficiency: fraction of `peak_flops` that is reached.
      memory_efficiency: fraction of `memory_bandwidth` that is reached.
      jax_kinds: beginnings of `jax.Device.device_kind` that mean this device.

    Raises:
      ValueError: a number is missing, not positive, or a fraction above one.
    """

    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    flops_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    jax_kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integer("memory_bytes", self.memory_bytes)
        check_positive("memory_bandwidth", self.memory_bandwidth)
        check_fraction("flops_efficiency", self.flops_efficiency)
        check_fraction("memory_efficiency", self.memory_efficiency)
        if not isinstance(self.peak_flops, Mapping) or "float32" not in self.peak_flops:
            raise ValueError(
                "`peak_flops` must be a table that gives flop/s for float32 at "
                f"least, but got {self.peak_flops!r}; add float32."
            )
        for dtype, flops in self.peak_flops.items():
            if dtype not in _DTYPES:
                raise ValueError(
                    f"`peak_flops` knows the dtypes {', '.join(_DTYPES)}, but "
                    f"got {dtype!r}{nearest(dtype, _DTYPES)}."
                )
            check_positive(f"peak_flops.{dtype}", flops)

    @property
    def bytes_per_second(self) -> float:
        """Memory bandwidth that is reached, bytes/s."""
        return self.memory_bandwidth * self.memory_efficiency

    def flops_per_second(self, dtype: Any) -> float:
        """Flop/s that a large matrix product of a dtype (or its name) reaches."""
        name = getattr(dtype, "name", None) or str(dtype)
        if not isinstance(dtype, str) and isinstance(dtype, type):
            name = np.dtype(dtype).name
        peak = self.peak_flops
        if name in ("float64", "complex128"):
            rate = peak.get("float64", peak["float32"] / 2)
        elif name.startswith("float8"):
            rate = peak.get("float8", peak.get("bfloat16", peak["float32"]))
        elif name in ("uint8", "int4", "uint4"):
            rate = peak.get("int8", peak["float32"])
        else:
            rate = peak.get(name, peak["float32"])
        return rate * self.flops_efficiency

    def __str__(self) -> str:
        rates = ", ".join(f"{d} {f / 1e12:g}" for d, f in self.peak_flops.items())
        return (
            f"{self.kind}: {self.memory_bytes / 1e9:g} GB at "
            f"{self.memory_bandwidth / 1e9:g} GB/s; peak Tflop/s: {rates}"
        )


@dataclass(frozen=True)
class Link:
    """What joins devices, within a host or between hosts.

    Attributes:
      name: such as `NVLink 4`.
      alpha_seconds: latency of one message.
      bandwidth: bytes/s of one device in one direction, all devices sending.
      efficiency: fraction of `bandwidth` that collectives reach.

    Raises:
      ValueError: a number is negative, or the efficiency not a fraction.
    """

    name: str
    alpha_seconds: float
    bandwidth: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        check_positive("alpha_seconds", self.alpha_seconds, zero=True)
        check_positive("bandwidth", self.bandwidth)
        check_fraction("efficiency", self.efficiency)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds for each byte that a device sends."""
        return 1.0 / (self.bandwidth * self.efficiency)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bandwidth / 1e9:g} GB/s a device, "
            f"{self.alpha_seconds * 1e6:g} us"
        )


@dataclass(frozen=True)
class AxisLink:
    """What a collective over one mesh axis, or several, meets.

    Attributes:
      size: number of devices in a group.
      alpha_seconds: latency of one message.
      seconds_per_byte: seconds for each byte that a device of the ring sends.
      launch_seconds: what starting a collective costs.
    """

    size: int
    alpha_seconds: float
    seconds_per_byte: float
    launch_seconds: float = 0.0


def check_positive(name: str, value: Any, zero: bool = False) -> None:
    """Raises ValueError unless `value` is a finite number above (or at) zero."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and (value > 0 or (zero and value == 0)):
        return
    least = "a number of at least zero" if zero else "a number above zero"
    raise ValueError(f"`{name}` must be {least}, but got {value!r}.")


def check_integer(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be an integer above zero, but got {value!r}.")


def check_fraction(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a number above zero and up to one."""
    check_positive(name, value)
    if value > 1:
        raise ValueError(f"`{name}` must be a fraction up to 1, but got {value!r}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that suggests the known name closest to a mistyped one."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, 0.4)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""
