"""What the hosts of a Ray cluster do for checkpoints.

Each writes the shards of the state that it holds; Orbax does the rest as for any state:
the directory, what describes it, and the rename. Nothing of the state passes through
the driver.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import HostLostError
from autopar.state.distributed_array import DistributedArray

from .ray_arrays import Keeper, RemoteArray
from .stored_arrays import (
    Digest,
    Writing,
    chunk_shape,
    create_array,
    moved,
)
from .transfers import tile_at


def _copied_out(leaves: Sequence[DistributedArray]) -> dict[Keeper, int]:
    """Has the workers copy leaves, which may be donated then; the tickets to write."""
    by_keeper: dict[Keeper, list[RemoteArray]] = {}
    for chunk in itertools.chain(*(leaf.chunks for leaf in leaves)):
        assert isinstance(chunk, RemoteArray)
        by_keeper.setdefault(chunk.keeper, []).append(chunk)
    return {keeper: keeper.copy_out(own) for keeper, own in by_keeper.items()}


def _written(
    leaves: Sequence[DistributedArray],
    tickets: Mapping[Keeper, int],
    paths: Sequence[Path],
) -> dict[str, Digest]:
    """Writes each leaf to its path; what each file holds, by its path from there."""
    writings: dict[Keeper, list[tuple[int, Writing]]] = {each: [] for each in tickets}
    for leaf, path in zip(leaves, paths, strict=True):
        tiles, first = [], 0
        for chunk in leaf.chunks:
            assert isinstance(chunk, RemoteArray)
            for device in range(chunk.type.num_devices):
                tile = tile_at(chunk.type.tile(device), chunk.shape)
                tiles.append(moved(tile, first))
            writing = Writing(chunk.number, str(path), first)
            writings[chunk.keeper].append((chunk.group, writing))
            first += chunk.shape[0] if chunk.shape else 0
        create_array(path, leaf.shape, leaf.dtype, chunk_shape(tiles))
    digests: dict[str, Digest] = {}
    for keeper, own in writings.items():
        digests |= keeper.write_out(tickets[keeper], own)
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
            tickets = _copied_out(values)

            async def write() -> None:
                for info in infos:
                    await info.await_path_creation()
                paths = [Path(info.path) for info in infos]
                digests.update(_written(values, tickets, paths))

            kind = orbax.future.CommitFutureAwaitingContractedSignals
            return [kind(write(), name="autopar workers write")]

    kinds = handlers.supported_types()
    registry = handlers.create_type_handler_registry(
        (DistributedArray, RemoteHandler()),
        *((kind, handlers.get_type_handler(kind)) for kind in kinds),
    )
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=registry
    )
