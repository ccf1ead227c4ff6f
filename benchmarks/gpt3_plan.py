"""GPT-3 175B planned on 1,024 devices of 80 GB, beside the closed forms of its bytes.

Nothing is run: shapes are abstract, and the devices a preset. Per device, with Psi
parameters, N devices, L layers, sequence s, hidden h and b examples a device:

  state       12 Psi / N        parameters and two moments of Adam in float32 (ZeRO-3)
  kept        2 s b h L         inputs of layers in 16 bits, all else recomputed
  gathered    up to 2 x 2 Psi   parameters in 16 bits, forward and backward
  reduced     Psi / N           elements of gradients: what a device keeps of the sums,
                                which 1,024 GPUs make by trees where rings would wait

(ZeRO, 1910.02054, section 5; activations: 2205.05198, section 4.)

    python -m benchmarks.gpt3_plan
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from time import perf_counter

import jax
import jax.numpy as jnp

import autopar
from autopar.sharding.spec import num_shards
from benchmarks.models import build, gpt

MODEL, CLUSTER, DEVICES = "gpt-175b", "128x8xH100", 1024


@dataclass(frozen=True)
class Figures:
    """Bytes of one device, planned and by the closed forms; seconds it took to plan."""

    state_bytes: int
    state_form: float
    kept_bytes: float
    kept_form: float
    gathered_bytes: int
    gathered_form: float
    reduced_bytes: int
    reduced_form: float
    peak_bytes: int
    device_bytes: int
    plan_seconds: float

    def __str__(self) -> str:
        lines = [f"{MODEL} on {CLUSTER}, planned in {self.plan_seconds:.1f} s"]
        for name in ("state", "kept", "gathered", "reduced"):
            planned = getattr(self, f"{name}_bytes")
            form = getattr(self, f"{name}_form")
            lines.append(f"  {name:10} {planned:18,.0f} B, closed form {form:18,.0f} B")
        peak = f"  {'peak':10} {self.peak_bytes:18,} B"
        lines.append(f"{peak}, of a device's {self.device_bytes:,}")
        return "\n".join(lines)


def measure(num_layers: int | None = None) -> Figures:
    """Plan the model with ZeRO-3, of all its layers or fewer."""
    config = gpt.SIZES[MODEL]
    layers = num_layers or config.num_layers
    options = {"scan_layers": True, "remat": True, "num_layers": layers}
    workload = build(MODEL, compute_dtype="bfloat16", **options)
    cluster = autopar.Cluster.preset(CLUSTER)
    step = autopar.parallelize(
        workload.step, mesh=f"data:{DEVICES}", cluster=cluster, method=autopar.Zero(3)
    )
    start = perf_counter()
    plan = step.plan(*workload.abstract())
    seconds = perf_counter() - start
    state, _ = workload.abstract()
    psi = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    examples = config.batch_size // DEVICES
    per_layer = 2 * config.seq_len * examples * config.hidden
    found = plan.sharding.collectives
    gathered = sum(c.total_bytes for c in found if c.kind == "all_gather")
    cut = {"reduce_scatter": 1, "all_reduce": DEVICES}
    reduced = sum(c.total_bytes // cut[c.kind] for c in found if c.kind in cut)
    return Figures(
        *(plan.sharding.state_bytes(), 12 * psi / DEVICES),
        *(_kept_bytes(plan, layers), float(per_layer * layers)),
        *(gathered, 2 * 2.0 * psi),
        *(reduced, 2.0 * psi / DEVICES),
        *(plan.predicted.peak_bytes, cluster.device.memory_bytes, seconds),
    )


def _kept_bytes(plan: autopar.Plan, num_layers: int) -> float:
    """What the forward loop over layers stacks for the backward one, on one device."""
    stacked = (
        tensor
        for tensor in plan.sharding.tensors
        if re.search(r"(?<!\()jvp\(.*/scan\.\d+:\d+$", tensor.name)
        and tensor.shape[:1] == (num_layers,)
    )
    sizes = plan.sharding.mesh.axis_sizes
    return sum(
        math.prod(each.shape)
        * jnp.dtype(each.dtype).itemsize
        / num_shards(each.spec, sizes)
        for each in stacked
    )


def main() -> None:
    print(measure())


if __name__ == "__main__":
    main()
