"""One device and one link: their speeds, checked, and what they reach of them."""

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..sharding.collective import COLLECTIVE_KINDS, CollectiveKind

_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8")
Curve: TypeAlias = Sequence[Sequence[float]]  # pairs of (flops, fraction of the peak)
Timings: TypeAlias = Mapping[str, Mapping[int, Curve]]  # by collective, group size

LEAST_SIDE = 256
"""Rows and columns of the smallest products that were measured."""

SPLIT_DEPTH = 4096
"""Longer contracted dims are cut into parts, which run side by side."""


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
      efficiency: for a dtype, its own `flops_efficiency`.
      product_area: elements of the results of a product, all of its batch, of which a
        large depth reaches half the rate: it is made of tiles, the last of which leave
        processors idle.
      product_depth: contracted elements that take half their time to begin and end.
      host_memory_bandwidth: bytes/s between the device and its host's memory, in each
        direction; that of PCIe 3.0 x16 if left out.

    Raises:
      ValueError: a number is missing, not positive, or a fraction above one; or a dtype
        has an efficiency and no peak.
    """

    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    flops_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    jax_kinds: tuple[str, ...] = ()
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    product_area: float = 0.0
    product_depth: float = 0.0
    host_memory_bandwidth: float = 16e9

    def __post_init__(self) -> None:
        check_integer("memory_bytes", self.memory_bytes)
        check_positive("memory_bandwidth", self.memory_bandwidth)
        check_positive("host_memory_bandwidth", self.host_memory_bandwidth)
        check_fraction("flops_efficiency", self.flops_efficiency)
        check_fraction("memory_efficiency", self.memory_efficiency)
        check_positive("product_area", self.product_area, zero=True)
        check_positive("product_depth", self.product_depth, zero=True)
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
        if not isinstance(self.efficiency, Mapping):
            raise ValueError(
                f"`efficiency` must be a table by dtype, but got {self.efficiency!r}."
            )
        for dtype, fraction in self.efficiency.items():
            if dtype not in self.peak_flops:
                raise ValueError(
                    f"`efficiency` has a fraction for {dtype!r}, of which `peak_flops` "
                    f"says nothing; add the peak or drop the fraction."
                )
            check_fraction(f"efficiency.{dtype}", fraction)

    @property
    def bytes_per_second(self) -> float:
        """Memory bandwidth that is reached, bytes/s."""
        return self.memory_bandwidth * self.memory_efficiency

    def flops_per_second(self, dtype: Any, num_flops: Any = math.inf) -> Any:
        """Flop/s that a matrix product of a dtype (or its name) reaches.

        `num_flops` are those of the product, of equal sizes in all directions, or an
        array of such; a large one if left out.
        """
        name = getattr(dtype, "name", None) or str(dtype)
        if not isinstance(dtype, str) and isinstance(dtype, type):
            name = np.dtype(dtype).name
        known, share = self._rate_of(name)
        most = self.efficiency.get(known, self.flops_efficiency)
        side = (num_flops / 2.0) ** (1 / 3)
        return self.peak_flops[known] * share * most / self._slowing(side * side, side)

    def product_seconds(self, dtype: Any, batch: int, m: int, n: int, k: int) -> float:
        """Seconds of `batch` products of [m, k] and [k, n], but for the memory's."""
        flops = 2.0 * batch * m * n * k
        slowing = self._slowing(batch * m * n, k)
        return float(flops / self.flops_per_second(dtype) * slowing)

    def _slowing(self, area: Any, depth: Any) -> Any:
        """How many times longer than at the rate of large ones a product takes."""
        larger = np.maximum if isinstance(depth, np.ndarray) else max
        parts = larger(depth / SPLIT_DEPTH, 1.0)
        idle = self.product_area / larger(area * parts, LEAST_SIDE**2)
        return (1 + idle) * (1 + self.product_depth / larger(depth, LEAST_SIDE))

    def _rate_of(self, name: str) -> tuple[str, float]:
        """The dtype whose units a dtype uses, and the part of their rate it gets."""
        stand_ins = {
            "complex128": ("float64",),
            "uint8": ("int8",),
            "int4": ("int8",),
            "uint4": ("int8",),
        }.get(name, ("float8", "bfloat16") if name.startswith("float8") else (name,))
        known = next((s for s in stand_ins if s in self.peak_flops), "float32")
        is_halved = known == "float32" and name in ("float64", "complex128")
        return known, 0.5 if is_halved else 1.0

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
      measured: what collectives took: pairs of (bytes of the whole tensor of a device,
        seconds), ascending, by kind and size of the group. Sizes between are
        interpolated; a kind left out is told by the numbers above.

    Raises:
      ValueError: a number is negative, the efficiency not a fraction, or what was
        measured is of an unknown kind or does not ascend.
    """

    name: str
    alpha_seconds: float
    bandwidth: float
    efficiency: float = 1.0
    measured: Timings = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_positive("alpha_seconds", self.alpha_seconds, zero=True)
        check_positive("bandwidth", self.bandwidth)
        check_fraction("efficiency", self.efficiency)
        _check_measured(self.measured)

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
      measured: what collectives took on the link, see `Link`.
      exchange_seconds_per_byte: seconds for each byte that a device sends in an
        all_to_all, where all devices of a host send to other hosts at once; that of
        the ring if None.
      ring_seconds: latency of going around all devices but one, as gathers and
        reduce_scatters between hosts of GPUs do; that of doubling if None.
    """

    size: int
    alpha_seconds: float
    seconds_per_byte: float
    launch_seconds: float = 0.0
    measured: Timings = field(default_factory=dict, hash=False)
    exchange_seconds_per_byte: float | None = None
    ring_seconds: float | None = None

    def seconds_per_sent_byte(self, kind: CollectiveKind) -> float:
        """Seconds for each byte that a device sends in a collective of some kind."""
        exchange = self.exchange_seconds_per_byte
        if kind == "all_to_all" and exchange is not None:
            return exchange
        return self.seconds_per_byte


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


def _check_measured(measured: Any) -> None:
    if not isinstance(measured, Mapping):
        raise ValueError(f"`measured` must be a table, but got {measured!r}.")
    for kind, by_group in measured.items():
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(
                f"`measured` knows {', '.join(COLLECTIVE_KINDS)}, but got {kind!r}"
                f"{nearest(kind, COLLECTIVE_KINDS)}."
            )
        for size, pairs in by_group.items():
            is_list = isinstance(pairs, list | tuple) and len(pairs) > 1
            if not is_list or any(
                len(low) != 2 or not (low[0] < high[0] and 0 < low[1] <= high[1])
                for low, high in itertools.pairwise(pairs)
            ):
                raise ValueError(
                    f"`measured.{kind}.{size}` must be two or more pairs [bytes, "
                    f"seconds], of more bytes no fewer seconds, but got {pairs!r}."
                )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that suggests the known name closest to a mistyped one."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, 0.4)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""
