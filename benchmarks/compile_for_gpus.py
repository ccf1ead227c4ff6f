"""Plans compiled for H100s that this machine has not: memory, and the audit.

Needs the CUDA plugin, `pip install "jax[cuda13]"`, and no GPU: the compiler is told
what the devices are. Products are not tuned, so all of them are cuBLAS's, which takes
`WORKSPACE_BYTES` besides while one runs. The cases are those of
`benchmarks/on_device.py`, with so many examples for each device. `audit` is whether
all collectives are those of the plan; exits with 1 where some are not.

    python -m benchmarks.compile_for_gpus
    python -m benchmarks.compile_for_gpus --cases gpt "gpt remat" --devices 8
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .on_device import CASES

WORKSPACE_BYTES = 32 << 20
# What the compiler asks of a device, as `xla/tools/hlo_opt/gpu_specs` has it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(count: int) -> list[Any]:
    """So many H100s of one host, which can be compiled for and nothing else.

    Raises:
      RuntimeError: jax has no CUDA plugin.
    """
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology=f"1x1x{count}"
        )
    except Exception as error:
        raise RuntimeError(
            "Compiling for GPUs takes JAX's CUDA plugin, which was not found; install "
            f"it with pip install 'jax[cuda13]' ({error})."
        ) from error
    return list(topology.devices)


def measure(case: str, count: int) -> tuple[int, int, bool]:
    """Bytes of one device, predicted and compiled, and whether the audit passes."""
    import numpy as np
    from jax.sharding import Mesh

    import autopar
    from autopar.audit.memory_use import MemoryUse

    from .models import build

    name, own = CASES[case]
    one = build(name, **own).abstract()[1]
    batch_size = count * next(iter(one.values())).shape[0]
    workload = build(name, **{**own, "batch_size": batch_size})
    step = autopar.parallelize(
        workload.step,
        mesh=Mesh(np.array(devices(count)), ("x",)),
        cluster=autopar.Cluster.preset(f"1x{count}xH100"),
    )
    compiled = step.lower(*workload.abstract()).compile()
    seen = MemoryUse.of(compiled.compiled)
    is_planned = compiled.audit().ok
    return compiled.plan.predicted.peak_bytes, seen.device_bytes, is_planned


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--devices", type=int, default=1, help="H100s of one host")
    asked = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    )
    print("| case | predicted MB | compiled MB | without workspace | ratio | audit |")
    print("|---|---|---|---|---|---|")
    all_are_planned = True
    for case in asked.cases:
        predicted, seen, is_planned = measure(case, asked.devices)
        all_are_planned &= is_planned
        rest = seen - WORKSPACE_BYTES
        print(
            f"| {case} | {predicted / 1e6:,.0f} | {seen / 1e6:,.0f} | "
            f"{rest / 1e6:,.0f} | {predicted / rest:.3f} | "
            f"{'ok' if is_planned else 'wrong'} |",
            flush=True,
        )
    return int(not all_are_planned)


if __name__ == "__main__":
    sys.exit(main())
