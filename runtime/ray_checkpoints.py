"""What the hosts of a Ray cluster do for checkpoints, each its share.

Each writes the shards of the state that it holds; Orbax does the rest as for any state:
the directory, what describes it, and the rename. Nothing of the state passes through
the driver. They check the files of a large one, too, before they read it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.clusters.ray_discovery import import_ray
from autopar.errors import HostLostError
from autopar.state.distributed_array import DistributedArray

from .ray_arrays import Keeper, RemoteArray
from .stored_arrays import (
    Digest,
    Writing,
    chunk_shape,
    create_array,
    file_problem,
    moved,
)

_log = logging.getLogger("autopar")
_SLOW_BYTES_PER_SECOND = 20e6  # of a file system, at the least
_START_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class RemoteSave:
    """Leaves on workers that are being saved; their values are copied there already."""

    leaves: tuple[DistributedArray, ...]
    tickets: Mapping[Keeper, int]

    @staticmethod
    def begin(leaves: Sequence[DistributedArray]) -> RemoteSave:
        """Have the workers copy leaves; when it returns these may be donated."""
        by_keeper: dict[Keeper, list[RemoteArray]] = {}
        for chunk in itertools.chain(*(leaf.chunks for leaf in leaves)):
            assert isinstance(chunk, RemoteArray)
            by_keeper.setdefault(chunk.keeper, []).append(chunk)
        tickets = {keeper: keeper.copy_out(own) for keeper, own in by_keeper.items()}
        return RemoteSave(tuple(leaves), tickets)

    def write(self, paths: Sequence[Path]) -> dict[str, Digest]:
        """Write each leaf to its path; what each file holds, by its path from there."""
        writings: dict[Keeper, list[tuple[int, Writing]]]
        writings = {keeper: [] for keeper in self.tickets}
        for leaf, path in zip(self.leaves, paths, strict=True):
            tiles, first = [], 0
            for chunk in leaf.chunks:
                assert isinstance(chunk, RemoteArray)
                for device in range(chunk.type.num_devices):
                    tile = [(p.start, p.stop) for p in chunk.type.tile(device)]
                    tiles.append(moved(tuple(tile), first))
                writing = Writing(chunk.number, str(path), first)
                writings[chunk.keeper].append((chunk.group, writing))
                first += chunk.shape[0] if chunk.shape else 0
            create_array(path, leaf.shape, leaf.dtype, chunk_shape(tiles))
        digests: dict[str, Digest] = {}
        for keeper, own in writings.items():
            digests |= keeper.write_out(self.tickets[keeper], own)
        return digests


def _is_not_lost_host(record: logging.LogRecord) -> bool:
    """Whether Orbax's threads have to tell of an error: a lost host is raised by ours.

    Each of them would print it with its traceback.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HostLostError)


def remote_handler(orbax: Any, digests: dict[str, Digest]) -> Any:
    """What Orbax writes a state with some of whose leaves lie on workers.

    `digests` gets the files of those, by their path in the checkpoint.
    """
    handlers = orbax.type_handlers
    logging.getLogger("absl").addFilter(_is_not_lost_host)

    class RemoteHandler(handlers.NumpyHandler):
        """Leaves on workers; read again they are ordinary arrays."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
        ) -> Sequence[Any]:
            """Copies the values, and writes them in the background."""
            begun = RemoteSave.begin(values)
            written = self._written(begun, infos)
            kind = orbax.future.CommitFutureAwaitingContractedSignals
            return [kind(written, name="autopar workers write")]

        async def _written(self, begun: RemoteSave, infos: Sequence[Any]) -> None:
            for info in infos:
                await info.await_path_creation()
            digests.update(begun.write([Path(info.path) for info in infos]))

    kinds = handlers.supported_types()
    registry = handlers.create_type_handler_registry(
        (DistributedArray, RemoteHandler()),
        *((kind, handlers.get_type_handler(kind)) for kind in kinds),
    )
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=registry
    )


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
