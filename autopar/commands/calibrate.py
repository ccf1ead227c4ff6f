"""`autopar calibrate`: measures the devices of this process, as costs want them.

Every device is at work in every measurement, so that what they share (cores, memory,
links) is shared as in a step. A measured program repeats one operation in a loop whose
length is fixed when it is compiled, each iteration using the one before; seconds are
the median of some runs, divided by the length, without what the loop itself takes.

  kernel       products of 8 x 8, several an iteration: what one more costs
  products     square matrix products by dtype and size: peak flop/s, area, depth
  memory       a multiply-add over an array that no cache holds: bytes/s
  host memory  arrays fetched from it, where the devices have memory of their own
  collectives  each kind, by size, over all devices and over pairs
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..clusters.cluster import Cluster
from ..clusters.measured_links import Timing, as_measured
from ..lowering.host_memory import HOST
from ..sharding.collective import COLLECTIVE_KINDS, CollectiveKind

Tell = Callable[[str], None]

_REPEATS = 16  # of short operations in one iteration
_SHORT_SECONDS = 1e-4
_AXIS = "member"  # of a group


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
      sizes: of the products, rows; larger ones are left out once a run is long.
      dtypes: of the products.
      memory_bytes: of the array that is streamed, on each device; if None, 1 GiB of
        accelerators, whose caches hold tens of MB, and 16 MiB of CPU devices.
      collective_bytes: what a device puts in or gets out, whichever is more. Sizes
        after the second are left out once the time is up.
      run_seconds: how long one run of a loop should take.
      runs: how many runs each median is of; one, where a run takes much longer.
      total_seconds: after which no more is begun than is needed.
    """

    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    memory_bytes: int | None = None
    collective_bytes: tuple[int, ...] = (1 << 12, 1 << 20, 1 << 24, 1 << 28, 1 << 16)
    run_seconds: float = 0.05
    runs: int = 3
    total_seconds: float = 40.0


def calibrate(effort: Effort | None = None, tell: Tell = lambda text: None) -> Cluster:
    """This process's devices with measured constants, as one host.

    Args:
      effort: how much to measure.
      tell: is given a line of text after each measurement.

    Raises:
      NotImplementedError: devices are spread over several processes.
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"Calibration measures the devices of one process, but jax runs in "
            f"{jax.process_count()}; run it on one host, then set `num_hosts` and "
            f"[network_link] in its file by hand."
        )
    return _Calibration(effort or Effort(), tell).run()


class _Calibration:
    def __init__(self, effort: Effort, tell: Tell) -> None:
        self.effort, self.tell = effort, tell
        self.base = Cluster.local()
        self.devices = np.array(jax.devices())
        self.deadline = perf_counter() + effort.total_seconds
        self.loop_seconds = 0.0  # of an iteration, besides what is measured in it
        self.is_cpu = self.devices[0].platform == "cpu"
        self.memory_bytes = effort.memory_bytes or (1 << 24 if self.is_cpu else 1 << 30)

    def run(self) -> Cluster:
        base = self.base
        kernel_seconds = self.kernel_seconds()
        peak_flops, (area, depth) = self.products(kernel_seconds)
        bandwidth = self.memory_bandwidth(kernel_seconds)
        device = replace(
            base.device,
            peak_flops=peak_flops,
            efficiency={},
            flops_efficiency=1.0,
            product_area=area,
            product_depth=depth,
            memory_bandwidth=bandwidth,
            memory_efficiency=1.0,
            host_memory_bandwidth=self.host_memory_bandwidth(),
        )
        number = len(self.devices)
        cluster = replace(
            base,
            name=f"1x{number}x{base.device.kind}",
            num_hosts=1,
            devices_per_host=number,
            device=device,
            kernel_seconds=kernel_seconds,
            source=f"autopar calibrate, jax {jax.__version__}, {number} "
            f"{self.devices[0].device_kind} devices",
        )
        if number == 1:
            return replace(cluster, network_link=base.host_link)
        link = as_measured(self.collectives(), base.host_link)
        self.tell(str(link))
        return replace(cluster, host_link=link, network_link=link)

    def kernel_seconds(self) -> float:
        """What an operator that fuses with no other takes at least.

        Notes what an iteration takes besides. At least half of the mean of many, which
        is what GPUs are told, as they run several such products as one kernel.
        """
        guess = self.base.kernel_seconds
        kernel = jnp.eye(8)

        def iteration(repeats: int) -> float:
            step = _repeated(_product, repeats)
            start = jnp.ones((8, 8))
            return self.seconds(step, start, repeats * guess, operands=(kernel,))

        one, many = iteration(1), iteration(_REPEATS)
        seconds = max(many - one, many / 2) / (_REPEATS - 1)
        self.loop_seconds = max(one - seconds, 0.0)
        self.tell(f"kernel      {seconds * 1e6:8.2f} us")
        return _rounded(seconds)

    def products(
        self, kernel_seconds: float
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Peak flop/s by dtype, and how area and depth slow products down."""
        peaks: dict[str, float] = {}
        slowing: list[tuple[int, float]] = []
        for dtype in self.effort.dtypes:
            rates: dict[int, float] = {}
            guess = self.base.device.flops_per_second(dtype)
            for size in self.effort.sizes:
                flops = 2.0 * size**3
                if flops / guess > self.effort.run_seconds:
                    break
                seconds = self.product_seconds(
                    size, dtype, kernel_seconds + flops / guess
                )
                rates[size] = flops / max(seconds - kernel_seconds, 0.2 * seconds)
                guess = max(rates.values())
                text = f"{rates[size] / 1e9:10.1f} Gflop/s"
                self.tell(f"product     {dtype:<8} {size:5d} {text}")
            peaks[dtype] = _rounded(max(rates.values()))
            slowing += [(size, peaks[dtype] / rate) for size, rate in rates.items()]
        return peaks, slowing_of(slowing)

    def product_seconds(self, size: int, dtype: str, guess: float) -> float:
        """Seconds of one square product, all devices at work.

        Of signs by chance: products of zeros run faster, as they take less power.
        """
        signs = np.random.default_rng(size).integers(0, 2, (size, size), np.int8)
        kernel = jnp.asarray(2 * signs - 1, dtype) * size**-0.5
        repeats = _REPEATS if guess < _SHORT_SECONDS else 1
        step = _repeated(_product, repeats)
        guess *= repeats
        return self.seconds(step, kernel, guess, operands=(kernel,)) / repeats

    def memory_bandwidth(self, kernel_seconds: float) -> float:
        """Bytes/s of a multiply-add over an array, each element read and written."""
        num_bytes = self.memory_bytes
        guess = 2 * num_bytes / self.base.device.bytes_per_second

        def step(x: jax.Array) -> jax.Array:
            return x * 0.5 + 1.0

        seconds = self.seconds(step, jnp.zeros(num_bytes // 4, jnp.float32), guess)
        rate = 2 * num_bytes / max(seconds - kernel_seconds, 0.2 * seconds)
        self.tell(f"memory      {rate / 1e9:8.2f} GB/s a device")
        return _rounded(rate)

    def host_memory_bandwidth(self) -> float:
        """Bytes/s of what all devices fetch from their host's memory at once."""
        if self.is_cpu:
            return self.base.device.host_memory_bandwidth
        number, length = len(self.devices), self.memory_bytes // 4
        mesh = Mesh(self.devices, ("device",), axis_types=(AxisType.Auto,))
        here = NamedSharding(mesh, PartitionSpec("device"))
        there = here.with_memory_kind(HOST)
        given = jax.device_put(np.ones(number * length, np.float32), there)
        fetch = jax.jit(lambda x: jax.device_put(x, here), in_shardings=there)
        seconds = self.run_seconds(lambda: fetch(given))
        rate = 4 * length / seconds
        self.tell(f"host memory {rate / 1e9:8.2f} GB/s a device")
        return _rounded(rate)

    def collectives(self) -> Iterator[Timing]:
        """Every kind at every size, in groups of all devices and of two."""
        number = len(self.devices)
        group_sizes = sorted({number, 2 if number % 2 == 0 else number})
        sizes = [n for n in self.effort.collective_bytes if n <= self.memory_bytes]
        for index, num_bytes in enumerate(sizes):
            for group_size in group_sizes:
                for kind in COLLECTIVE_KINDS:
                    if index < 2 or perf_counter() < self.deadline:
                        yield self.collective(kind, group_size, num_bytes)

    def collective(
        self, kind: CollectiveKind, group_size: int, num_bytes: int
    ) -> Timing:
        """One collective of float32, of `num_bytes` on each device."""
        length = max(num_bytes // 4 // group_size, 1) * group_size
        guess = 2e-4 + 16 * length / self.base.host_link.bandwidth
        start = jnp.zeros(length, jnp.float32)
        seconds = self.seconds(_STEPS[kind], start, guess, group_size)
        text = f"{kind:<18} of {group_size:<3} {4 * length:8d} B"
        self.tell(f"collective  {text} {seconds * 1e6:9.1f} us")
        return Timing(kind, group_size, 4.0 * length, seconds)

    def seconds(
        self,
        step: Callable[..., jax.Array],
        start: jax.Array,
        guess: float,
        group_size: int | None = None,
        operands: tuple[jax.Array, ...] = (),
    ) -> float:
        """Seconds of one `step` in a loop, on every device at once.

        `step` takes what it gave the last time, and the operands, which stay.
        """
        number = len(self.devices)
        group_size = group_size or number
        devices = self.devices.reshape(-1, group_size)
        mesh = Mesh(devices, ("group", _AXIS), axis_types=(AxisType.Auto,) * 2)
        spec = PartitionSpec(("group", _AXIS))
        sharding = NamedSharding(mesh, spec)
        given = jax.jit(
            lambda x: jnp.broadcast_to(x, (number, *x.shape)), out_shardings=sharding
        )(start)
        whole = NamedSharding(mesh, PartitionSpec())
        others = jax.device_put(operands, whole)
        length = int(min(max(self.effort.run_seconds / guess, 3), 2000))

        def local(x: jax.Array, *others: jax.Array) -> jax.Array:
            def iteration(_: Any, each: jax.Array) -> jax.Array:
                return step(each, *others)

            return lax.fori_loop(0, length, iteration, x[0])[None]

        in_specs = (spec, *(PartitionSpec() for _ in others))
        run = jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False
            )
        )
        seconds = self.run_seconds(lambda: run(given, *others)) / length
        return max(seconds - self.loop_seconds, 0.2 * seconds)

    def run_seconds(self, run: Callable[[], Any]) -> float:
        """The median of some runs, after one that compiles."""
        jax.block_until_ready(run())
        times: list[float] = []
        while len(times) < self.effort.runs:
            if sum(times) > 4 * self.effort.run_seconds * self.effort.runs:
                break
            began = perf_counter()
            jax.block_until_ready(run())
            times.append(perf_counter() - began)
        return statistics.median(times)


def slowing_of(slowing: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """`product_area` and `product_depth` from sizes of square products.

    `slowing` are pairs of (rows, how many times longer than at the best rate); relative
    errors are least without what both do together.
    """
    sizes, times = np.array(slowing, float).T
    rows = np.stack([sizes**-2, 1 / sizes], axis=1) / times[:, None]
    found = np.zeros(2)
    for columns in ([0, 1], [0], [1]):  # one alone, where noise makes the other help
        fitted, *_ = np.linalg.lstsq(rows[:, columns], 1 - 1 / times)
        if (fitted >= 0).all():
            found[columns] = fitted
            break
    return _rounded(float(found[0])), _rounded(float(found[1]))


def _rounded(value: float) -> float:
    """Four digits of it, as many as a measurement has at best."""
    return float(f"{value:.4g}")


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


def _repeated(step: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """`step`, so many times one after the other."""

    def run(x: jax.Array, *operands: jax.Array) -> jax.Array:
        for _ in range(times):
            x = step(x, *operands)
        return x

    return run


def _all_gather(x: jax.Array) -> jax.Array:
    mine = x[: len(x) // lax.axis_size(_AXIS)]
    return lax.all_gather(mine, _AXIS, tiled=True)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    shard = lax.psum_scatter(x, _AXIS, tiled=True)
    return lax.dynamic_update_slice(x, shard, (0,))


def _collective_permute(x: jax.Array) -> jax.Array:
    size = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


_STEPS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: lax.psum(x, _AXIS),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda x: lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
    "collective_permute": _collective_permute,
}
