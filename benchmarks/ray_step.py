"""Seconds of a step on two hosts of a local Ray cluster, beside one process.

Both run the same plan on eight virtual devices; the Ray hosts are processes of this
machine, so what is measured is the driver, the hosts' instruction lists and gloo.

    python -m benchmarks.ray_step --model mlp --rounds 10
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.clusters.cluster import Cluster

    from .models import Workload

HOSTS, DEVICES = 2, 4  # devices of each


@dataclass(frozen=True)
class Measurement:
    """Medians in seconds; the first call plans, starts the hosts and compiles.

    Bytes are those of a device in the plan that the hosts ran.
    """

    model: str
    first_call_seconds: float
    ray_seconds: float
    local_seconds: float
    collective_bytes: int
    peak_bytes: int


def planned_bytes(workload: Workload, cluster: Cluster | None = None) -> dict[str, int]:
    """Bytes of the plan for a Ray cluster; one that is not started if left out."""
    import autopar
    from autopar.clusters.cluster import Cluster, RayHosts

    if cluster is None:
        nowhere = RayHosts("", "cpu", step_seconds=1.0)
        preset = Cluster.preset(f"{HOSTS}x{DEVICES}xCPU")
        cluster = replace(preset, ray_hosts=nowhere)
    step = autopar.parallelize(workload.step, cluster=cluster)
    predicted = step.plan(*workload.abstract()).predicted
    return {
        "collective_bytes": predicted.collective_bytes,
        "peak_bytes": predicted.peak_bytes,
    }


def measure(model: str, rounds: int) -> Measurement:
    """Time `rounds` steps on both, after two that warm up.

    Raises:
      ImportError: ray is not installed.
    """
    import jax

    import autopar
    from autopar.runtime.ray_local import local_ray_cluster

    from .models import build

    workload = build(model)
    batch = workload.make_batch(0)

    def timed(step: Any, wait: Callable[[Any], Any]) -> list[float]:
        state, times = workload.init(jax.random.key(0)), []
        for _ in range(rounds + 2):
            start = perf_counter()
            state, metrics = step(state, batch)
            wait(metrics)
            times.append(perf_counter() - start)
        return times

    local = timed(autopar.parallelize(workload.step), jax.block_until_ready)
    with local_ray_cluster(HOSTS, DEVICES) as address:
        cluster = autopar.Cluster.ray(address)
        step = autopar.parallelize(workload.step, cluster=cluster)
        remote = timed(step, autopar.fetch)
        planned = planned_bytes(workload, cluster)
    there, here = (statistics.median(times[2:]) for times in (remote, local))
    return Measurement(model, remote[0], there, here, **planned)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    found = measure(arguments.model, arguments.rounds)
    print(json.dumps(asdict(found)) if arguments.json else found)


if __name__ == "__main__":
    main()
