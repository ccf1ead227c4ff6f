"""Plans on the devices of this process, GPUs say: predicted beside what they do.

For every case, in a process of its own: whether the losses of three steps are those of
plain `jit` on one device, a step's seconds as predicted and as measured, also beside
`jit`, and bytes of a device as predicted, as compiled, and as its allocator saw them at
their highest (0 where it does not say). `--alone` leaves `jit` out, which is as long to
compile. `--budget` is a fraction of what the plan without one is predicted to hold.

    python -m benchmarks.on_device --cluster my.toml --json found.json
    python -m benchmarks.on_device --cases gpt --mesh "x:4;y:2"
    python -m benchmarks.on_device --cases gpt t5 --budget 0.7 --remat auto
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

_BF16 = {"compute_dtype": "bfloat16"}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt": ("gpt-350m", {"batch_size": 8, "num_layers": 8, **_BF16}),
    "gpt float32": ("gpt-125m", {"batch_size": 8}),
    "gpt remat": ("gpt-350m", {"batch_size": 16, "remat": True, **_BF16}),
    "gpt scan": (
        "gpt-350m",
        {"batch_size": 8, "num_layers": 8, "scan_layers": True, **_BF16},
    ),
    "llama": (
        "llama-8b",
        {"batch_size": 2, "seq_len": 2048, "num_layers": 2, "hidden": 2048}
        | {"num_heads": 16, "num_kv_heads": 4, "width": 7168, "vocab_size": 32000}
        | _BF16,
    ),
    "bert": ("bert-base", {"batch_size": 32}),
    "moe": ("moe-380m", {"batch_size": 8, "num_layers": 4}),
    "t5": ("t5-small", {"batch_size": 32}),
    "vit": ("vit-base", {"batch_size": 64}),
    "resnet": ("resnet-50", {"batch_size": 64}),
    "unet": ("unet-2d", {"batch_size": 4, "image_size": 256}),
    "lstm": ("lstm-medium", {}),
    "mlp": ("mlp-100m", {}),
}
NUM_STEPS = 3  # whose losses are compared


@dataclass(frozen=True)
class Measurement:
    """One case; bytes and seconds are of one device and one step."""

    case: str
    mesh: str
    loss_error: float
    predicted_seconds: float
    measured_seconds: float
    jit_seconds: float
    predicted_bytes: int
    compiled_bytes: int
    peak_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        ratio = self.predicted_bytes / self.compiled_bytes
        return (
            f"| {self.case} | {self.mesh} | {self.loss_error:.1e} | "
            f"{self.predicted_seconds * 1e3:.2f} | {self.measured_seconds * 1e3:.2f} | "
            f"{self.predicted_seconds / self.measured_seconds:.2f} | "
            f"{self.measured_seconds / self.jit_seconds:.3f} | "
            f"{self.predicted_bytes / 1e6:,.1f} | {self.compiled_bytes / 1e6:,.1f} | "
            f"{ratio:.3f} | {self.peak_bytes / 1e6:,.1f} | "
            f"{self.budget_bytes / 1e6:,.1f} |"
        )


_COLUMNS = (
    *("case", "mesh", "loss error", "predicted ms", "measured ms", "ratio"),
    *("times jit", "predicted MB", "compiled MB", "ratio", "peak MB", "budget MB"),
)


def measure(
    case: str,
    mesh: str | None,
    cluster_path: str | None,
    rounds: int,
    alone: bool,
    budget: float | None = None,
    **options: Any,
) -> Measurement:
    """Plan, check, time; `options` are those of `autopar.parallelize`.

    `budget` is a fraction of what the plan without these options is predicted to hold.
    """
    import jax

    import autopar
    from autopar.audit.memory_use import MemoryUse

    from .models import build

    name, own = CASES[case]
    workload = build(name, **own)
    cluster = autopar.Cluster.load(cluster_path) if cluster_path else None
    if budget:
        free = autopar.parallelize(workload.step, mesh=mesh, cluster=cluster)
        held = free.plan(*workload.abstract()).predicted.peak_bytes
        options["memory_budget"] = int(budget * held)
    step = autopar.parallelize(workload.step, mesh=mesh, cluster=cluster, **options)
    compiled = step.lower(*workload.abstract()).compile()
    seen = MemoryUse.of(compiled.compiled)
    losses, seconds = _run(step, workload, rounds)
    stats = jax.devices()[0].memory_stats() or {}
    peak_bytes = int(stats.get("peak_bytes_in_use", 0))
    oracle, jit_seconds = losses, nan
    if not alone:
        plain = jax.jit(workload.step, donate_argnums=0)
        oracle, jit_seconds = _run(plain, workload, rounds)
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, oracle, strict=True)]
    predicted = compiled.plan.predicted
    return Measurement(
        case,
        str(compiled.plan.sharding.mesh),
        nan if alone else max(errors),
        predicted.step_seconds,
        seconds,
        jit_seconds,
        predicted.peak_bytes,
        seen.device_bytes,
        peak_bytes,
        options.get("memory_budget", 0),
    )


def _run(
    step: Callable[..., Any], workload: Any, rounds: int
) -> tuple[list[float], float]:
    """The losses of the first steps, and the median seconds of those after them."""
    import jax

    state = workload.init(jax.random.key(0))
    batches = [jax.device_put(workload.make_batch(i)) for i in range(NUM_STEPS)]
    losses, times = [], []
    for number in range(NUM_STEPS + rounds):
        began = perf_counter()
        state, metrics = step(state, batches[number % NUM_STEPS])
        jax.block_until_ready((state, metrics))
        times.append(perf_counter() - began)
        if number < NUM_STEPS:
            losses.append(float(metrics["loss"]))
    return losses, statistics.median(times[NUM_STEPS:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--mesh", help="axes such as 'x:8'; the planner's if left out")
    parser.add_argument("--cluster", help="a file that autopar calibrate wrote")
    parser.add_argument("--budget", type=float, help="a fraction, such as 0.7")
    parser.add_argument("--remat", choices=["auto", "full"])
    parser.add_argument("--offload", choices=["auto", "state"])
    parser.add_argument("--alone", action="store_true", help="do not run jit's program")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the measurements there")
    parser.add_argument("--here", action="store_true", help="no process for each case")
    asked = parser.parse_args()
    if asked.here:
        named = {"remat": asked.remat, "offload": asked.offload}
        options = {name: given for name, given in named.items() if given}
        for case in asked.cases:
            given = asked.mesh, asked.cluster, asked.rounds, asked.alone, asked.budget
            print(json.dumps(asdict(measure(case, *given, **options))), flush=True)
        return 0
    print("|", " | ".join(_COLUMNS), "|")
    print("|---" * len(_COLUMNS) + "|")
    found: list[Measurement] = []
    failed = 0
    for case in asked.cases:
        command = [sys.executable, "-m", "benchmarks.on_device", "--here"]
        command += ["--cases", case, "--rounds", str(asked.rounds)]
        command += ["--alone"] * asked.alone
        for name in ("mesh", "cluster", "budget", "remat", "offload"):
            if getattr(asked, name):
                command += [f"--{name}", str(getattr(asked, name))]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            failed += 1
            print(f"| {case} | failed: {ran.stderr.strip()[-1500:]} |", flush=True)
            continue
        found.append(Measurement(**json.loads(ran.stdout.strip().splitlines()[-1])))
        print(found[-1], flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in found]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
