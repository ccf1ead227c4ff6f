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

    from .targets import BenchStep

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


def planned_bytes(target: BenchStep, cluster: Cluster | None = None) -> dict[str, int]:
    """Bytes of the plan for a Ray cluster; one that is not started if left out."""
    import autopar
    from autopar.clusters.cluster import Cluster, RayHosts

    if cluster is None:
        nowhere = RayHosts("", "cpu", step_seconds=1.0)
        preset = Cluster.preset(f"{HOSTS}x{DEVICES}xCPU")
        cluster = replace(preset, ray_hosts=nowhere)
    step = autopar.parallelize(target.step, cluster=cluster)
    predicted = step.plan(*target.abstract()).predicted
    return {
        "collective_bytes": predicted.collective_bytes,
        "peak_bytes": predicted.peak_bytes,
    }


def measure(target: BenchStep, rounds: int) -> Measurement:
    """Time `rounds` steps on both, after two that warm up.

    A step gets what the one before it returned, where that has the types of arguments,
    and else the same arguments again.

    Raises:
      ImportError: ray is not installed.
    """
    import jax

    import autopar
    from autopar.runtime.ray_local import local_ray_hosts

    arguments = target.arguments()
    places = _fed(arguments, jax.eval_shape(target.step, *arguments))
    donated: Any = "auto" if places else ()

    def timed(cluster: Cluster | None, wait: Callable[[Any], Any]) -> list[float]:
        given = {"cluster": cluster, "donate_argnums": donated}
        step = autopar.parallelize(target.step, **given)
        current, times = list(target.arguments()), []
        for _ in range(rounds + 2):
            start = perf_counter()
            results = _parts(step(*current))
            last = [part for i, part in enumerate(results) if i not in places.values()]
            wait(last or results)
            times.append(perf_counter() - start)
            for argument, result in places.items():
                current[argument] = results[result]
        return times

    local = timed(None, jax.block_until_ready)
    with local_ray_hosts(HOSTS, DEVICES) as hosts:
        cluster = autopar.Cluster.ray(hosts.address)
        remote = timed(cluster, autopar.fetch)
        planned = planned_bytes(target, cluster)
    there, here = (statistics.median(times[2:]) for times in (remote, local))
    return Measurement(target.name, remote[0], there, here, **planned)


def _parts(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _fed(arguments: tuple[Any, ...], results: Any) -> dict[int, int]:
    """Which result is which argument of the next step, both by position."""
    import jax

    def types(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype) for x in map(jax.typeof, leaves)]

    def types_of_result(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype) for x in leaves]

    left = dict(enumerate(map(types_of_result, _parts(results))))
    found: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        own = types(argument)
        same = [i for i, kind in left.items() if kind == own]
        if same:
            found[number] = same[0]
            del left[same[0]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mlp", help="or MODULE:NAME")
    parser.add_argument("--args", help="MODULE:NAME of a step's example arguments")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices
    from autopar.commands.plan_targets import parse_settings

    from .targets import find_target

    use_virtual_devices(HOSTS * DEVICES)
    settings = parse_settings(arguments.set)
    target = find_target(arguments.model, arguments.args, settings)
    found = measure(target, arguments.rounds)
    print(json.dumps(asdict(found)) if arguments.json else found)


if __name__ == "__main__":
    main()
