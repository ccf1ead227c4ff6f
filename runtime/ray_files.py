"""The files of a checkpoint, checked by the hosts of a Ray cluster, each its share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from .ray_hosts import import_ray
from .stored_arrays import Digest, file_problem

_log = logging.getLogger("autopar")
_SLOW_BYTES_PER_SECOND = 20e6  # of a file system, at the least
_START_SECONDS = 60.0


def doubted_files(
    directory: Path, files: Mapping[str, Digest]
) -> dict[str, str] | None:
    """What hosts find wrong with files of a directory that they share, by their names.

    None where no cluster is connected, or its hosts cannot say.
    """
    ray = import_ray()
    if not ray.is_initialized():
        return None
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    check = ray.remote(problems_of)
    largest_first = sorted(files, key=lambda name: -files[name][0])
    shares = [largest_first[i :: len(nodes)] for i in range(len(nodes))]
    tasks = [
        check.options(
            num_cpus=0.01,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(str(directory), {name: files[name] for name in share})
        for node, share in zip(nodes, shares, strict=True)
        if share
    ]
    num_bytes = sum(size for size, _ in files.values())
    seconds = _START_SECONDS + num_bytes / _SLOW_BYTES_PER_SECOND
    try:
        answers: list[dict[str, str]] = ray.get(tasks, timeout=seconds)
    except ray.exceptions.RayError as error:
        _log.warning("the hosts could not check %s: %s", directory, error)
        return None
    return {name: problem for each in answers for name, problem in each.items()}


def problems_of(directory: str, files: Mapping[str, Digest]) -> dict[str, str]:
    """What is wrong with files as this host sees them."""
    found = {name: file_problem(Path(directory) / name, files[name]) for name in files}
    return {name: problem for name, problem in found.items() if problem}
