"""Plans on the devices of this process, GPUs say: predicted beside what they do.

For every case, in a process of its own: whether the losses of three steps are those of
plain `jit` on one device, a step's seconds as predicted and as measured, also beside
`jit`, and bytes of a device as predicted, as compiled, and as its allocator saw them at
their highest (0 where it does not say). `--alone` leaves `jit` out, which is as long to
compile. `--budget` is a fraction of what the plan without one is predicted to hold.
`--texts` keeps each compiled program with the seconds that its kernels took in a step,
by instruction. `--jobs` traces and plans several cases at once; one at a time compiles
and runs.

    python -m benchmarks.on_device --cluster my.toml --json found.json
    python -m benchmarks.on_device --cases gpt --mesh "x:4;y:2"
    python -m benchmarks.on_device --cases gpt t5 --budget 0.7 --remat auto
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    texts: Path | None = None,
    lock: Path | None = None,
    **options: Any,
) -> Measurement:
    """Plan, check, time; `options` are those of `autopar.parallelize`.

    `budget` is a fraction of what the plan without these options is predicted to hold.
    What compiles and runs waits for `lock`, a file; programs are kept in `texts`.
    """
    import jax

    import autopar
    from autopar.lowering.memory_use import MemoryUse

    from .models import build

    name, own = CASES[case]
    workload = build(name, **own)
    cluster = autopar.Cluster.load(cluster_path) if cluster_path else None
    if budget:
        free = autopar.parallelize(workload.step, mesh=mesh, cluster=cluster)
        held = free.plan(*workload.abstract()).predicted.peak_bytes
        options["memory_budget"] = int(budget * held)
    step = autopar.parallelize(workload.step, mesh=mesh, cluster=cluster, **options)
    lowered = step.lower(*workload.abstract())
    if lock is not None:  # what makes the arguments is compiled before
        jax.block_until_ready(workload.arguments())
    oracle, jit_seconds = [nan] * NUM_STEPS, nan
    with _held(lock):
        compiled = lowered.compile()
        seen = MemoryUse.of(compiled.compiled)
        losses, seconds = _run(step, workload, rounds)
        stats = jax.devices()[0].memory_stats() or {}
        peak_bytes = int(stats.get("peak_bytes_in_use", 0))
        if not alone:
            plain = jax.jit(workload.step, donate_argnums=0)
            oracle, jit_seconds = _run(plain, workload, rounds)
        kernels = _kernels(step, workload) if texts else None
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, oracle, strict=True)]
    predicted = compiled.plan.predicted
    found = Measurement(
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
    if texts:
        text = compiled.compiled.as_text()
        kept = {"measured": asdict(found), "kernels": kernels, "text": text}
        texts.mkdir(parents=True, exist_ok=True)
        path = texts / f"{case.replace(' ', '_')}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(kept).encode()))
    return found


@contextmanager
def _held(lock: Path | None) -> Iterator[None]:
    """Alone among the processes that hold the same file."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kernels(step: Callable[..., Any], workload: Any) -> dict[str, tuple[int, float]]:
    """How often each kernel of one step ran, and its seconds: "instruction kernel"."""
    import jax

    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    state, _ = jax.block_until_ready(step(state, batch))
    found: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(state, batch))
        for path in Path(folder).rglob("*.xplane.pb"):
            data = jax.profiler.ProfileData.from_file(str(path))
            for plane in data.planes:
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        own = dict(event.stats)
                        name = f"{own.get('hlo_op', '')} {event.name}"
                        number, seconds = found.get(name, (0, 0.0))
                        seconds += event.duration_ns * 1e-9
                        found[name] = number + 1, seconds
    return found


def _run(
    step: Callable[..., Any], workload: Any, rounds: int
) -> tuple[list[float], float]:
    """The losses of the first steps, and the seconds of one of those after them.

    These are called one after the other, as a training loop does, and waited for at the
    end of all; the median of three times `rounds`.
    """
    import jax

    state = workload.init(jax.random.key(0))
    batches = [jax.device_put(workload.make_batch(i)) for i in range(NUM_STEPS)]
    losses, times, metrics = [], [], None
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    for _ in range(3):
        began = perf_counter()
        for number in range(rounds):
            state, metrics = step(state, batches[number % NUM_STEPS])
        jax.block_until_ready((state, metrics))
        times.append((perf_counter() - began) / rounds)
    return losses, statistics.median(times)


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
    parser.add_argument("--texts", type=Path, help="keep programs and kernels there")
    parser.add_argument("--jobs", type=int, default=1, help="cases planned at once")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help="no process for each case")
    asked = parser.parse_args()
    if asked.here:
        named = {"remat": asked.remat, "offload": asked.offload}
        options = {name: given for name, given in named.items() if given}
        for case in asked.cases:
            given = asked.mesh, asked.cluster, asked.rounds, asked.alone, asked.budget
            given = *given, asked.texts, asked.lock
            print(json.dumps(asdict(measure(case, *given, **options))), flush=True)
        return 0
    print("|", " | ".join(_COLUMNS), "|")
    print("|---" * len(_COLUMNS) + "|")
    found: list[Measurement] = []
    failed = 0

    def run(case: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.on_device", "--here"]
        command += ["--cases", case, "--rounds", str(asked.rounds), "--lock", lock.name]
        command += ["--alone"] * asked.alone
        for name in ("mesh", "cluster", "budget", "remat", "offload", "texts"):
            if getattr(asked, name):
                command += [f"--{name}", str(getattr(asked, name))]
        return subprocess.run(command, capture_output=True, text=True)

    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(asked.jobs) as pool:
        for case, ran in zip(asked.cases, pool.map(run, asked.cases), strict=True):
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
