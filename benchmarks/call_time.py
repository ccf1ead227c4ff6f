"""What a call costs besides the work: every call, and the first one.

  calls   a step that adds one to 500 small arrays, so that handling arguments and
          results is all there is to time, beside jit with the same shardings; the
          arrays in a list, in nested dicts, in modules whose functions are leaves (jit
          gets these without functions), or in a list beside a key closed over
  first   the first call of a 12-layer GPT (a scan over its layers), which plans, lowers
          and compiles, beside jit's first call on one device, which compiles

Seconds are those of the processor, of the calling thread for calls and of the process
for first calls, as others may use the machine. Both are taken in turns, first calls in
a new process each; ratios are taken turn by turn and the median is printed.

    python -m benchmarks.call_time --rounds 200
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time, thread_time
from typing import Any, Literal, get_args

MESH = "x:8"
NUM_LEAVES = 500
NUM_LAYERS = 12
_WARM_UP = 4

Kind = Literal["list", "dicts", "modules", "key"]


@dataclass(frozen=True)
class CallTime:
    """Median CPU seconds of ours and of jit's, and the median of their ratios."""

    case: str
    our_seconds: float
    jit_seconds: float
    ratio: float


def measure_calls(
    rounds: int, num_leaves: int = NUM_LEAVES, kind: Kind = "list"
) -> CallTime:
    """Seconds of the calling thread until a call has returned.

    `num_leaves` are a multiple of 20.
    """
    import jax
    import numpy as np

    import autopar

    key = jax.random.key(0)

    def step(state: Any) -> Any:
        by = jax.random.uniform(key, (64,)) if kind == "key" else 1
        return jax.tree.map(lambda x: x if callable(x) else x + by, state)

    arrays = [np.zeros(64, np.float32) for _ in range(num_leaves)]
    parallel = autopar.parallelize(step, mesh=MESH, donate_argnums=())
    state = parallel(_in_trees(arrays, kind, jax.tree_util.Partial))
    plain = jax.tree.map(lambda x: None if callable(x) else x, state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plain)
    jitted = jax.jit(step, in_shardings=(shardings,), out_shardings=shardings)

    def seconds_of(program: Callable[[Any], Any], given: Any) -> float:
        start = thread_time()
        results = program(given)
        seconds = thread_time() - start
        jax.block_until_ready(jax.tree.leaves(results))
        return seconds

    pairs: list[tuple[float, float]] = []
    for turn in range(_WARM_UP + rounds):
        both = [(parallel, state), (jitted, plain)]
        order = (0, 1) if turn % 2 else (1, 0)  # whoever is first finds colder caches
        seconds = {i: seconds_of(*both[i]) for i in order}
        pairs.append((seconds[0], seconds[1]))
    name = "" if kind == "list" else f", {kind}"
    return _summary(f"calls with {num_leaves} leaves{name}", pairs[_WARM_UP:])


def _in_trees(arrays: list[Any], kind: Kind, module: Callable[..., Any]) -> Any:
    """The arrays in a tree; a module has an array, another one and a function."""
    pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
    if kind == "modules":
        return [module(max, {"w": w, "b": b, "f": abs}) for w, b in pairs]
    if kind == "dicts":
        layers = (pairs[i : i + 5] for i in range(0, len(pairs), 5))
        return {
            f"layer_{i}": {
                f"part_{j}": {"w": w, "b": b} for j, (w, b) in enumerate(each)
            }
            for i, each in enumerate(layers)
        }
    return arrays


def measure_first_call(rounds: int, num_layers: int = NUM_LAYERS) -> CallTime:
    """Seconds of first calls, results included, each in a process of its own.

    Nothing that an earlier run kept on disk is used.
    """
    pairs = [
        (_first_seconds("ours", num_layers), _first_seconds("jit", num_layers))
        for _ in range(rounds)
    ]
    return _summary(f"first call of a GPT of {num_layers} scanned layers", pairs)


def _first_seconds(program: str, num_layers: int) -> float:
    """What a new process prints."""
    off = {"AUTOPAR_CACHE_DIR": "off", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = ["-m", "benchmarks.call_time", "--first", program, str(num_layers)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **off},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"A first call must succeed, but failed: {why}")
    return float(done.stdout.split()[-1])


def _time_first_call(program: str, num_layers: int) -> float:
    import jax

    import autopar

    from .models import build

    workload = build("gpt", num_layers=num_layers, scan_layers=True)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    jax.block_until_ready((state, batch))
    start = process_time()
    if program == "jit":
        step = jax.jit(workload.step)
    else:
        step = autopar.parallelize(workload.step, mesh=MESH, donate_argnums=())
    jax.block_until_ready(step(state, batch))
    return process_time() - start


def _summary(case: str, pairs: Sequence[tuple[float, float]]) -> CallTime:
    ours, jits = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return CallTime(case, statistics.median(ours), statistics.median(jits), ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="calls of each")
    parser.add_argument("--first-rounds", type=int, default=3, help="first calls")
    parser.add_argument(
        "--first",
        nargs=2,
        metavar=("PROGRAM", "LAYERS"),
        help="only time one first call, of `ours` or `jit`",
    )
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    if arguments.first:
        program, num_layers = arguments.first
        print(_time_first_call(program, int(num_layers)))
        return
    for kind in get_args(Kind):
        _tell(measure_calls(arguments.rounds, kind=kind))
    _tell(measure_first_call(arguments.first_rounds))


def _tell(found: CallTime) -> None:
    print(
        f"{found.case}: {found.our_seconds * 1e3:.2f} ms, jit "
        f"{found.jit_seconds * 1e3:.2f} ms, {found.ratio:.2f} times",
        flush=True,
    )


if __name__ == "__main__":
    main()
