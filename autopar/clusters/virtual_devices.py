"""Virtual CPU devices: how plans run and are checked on a machine without a cluster."""

from __future__ import annotations

import os

import jax


def use_virtual_devices(count: int) -> None:
    """Make this process see `count` CPU devices and no others.

    Must come before jax is used for the first time, as the number is fixed then.

    Raises:
      ValueError: `count` is not positive.
      RuntimeError: jax was used before, with fewer devices.
    """
    if count < 1:
        raise ValueError(
            f"`devices` must be 1 or more, but got {count}; 8 is a good number."
        )
    # With fewer threads than twice the devices, steps that overlap can deadlock.
    threads = max(2 * count, int(os.environ.get("NPROC", "0") or 0))
    os.environ["NPROC"] = str(threads)
    # XLA's concurrent CPU scheduler crashes on some programs with collectives.
    flags = os.environ.get("XLA_FLAGS", "")
    if "concurrency_optimized_scheduler" not in flags:
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false".strip()
        )
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax is running already: what it has may do
        pass
    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) < count:
        raise RuntimeError(
            f"virtual devices must be made before jax is used, but jax runs with "
            f"{len(devices)} {devices[0].platform} devices and {count} are needed; "
            "start a fresh process."
        )
