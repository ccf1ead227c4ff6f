"""Arrays in a checkpoint, written and read in parts by whoever holds or wants these.

An array is a zarr array as Orbax has it: a directory with a file for each chunk. Hosts
that write one array write different chunks, so none waits for another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.state.distributed_array import ReadWhenAsked

from .transfers import Tile, tile_at

Digest = tuple[int, str]  # bytes and SHA-256 of a file


@dataclass(frozen=True)
class Writing:
    """An array kept under a number, and from which row of a stored one it is written.

    `path` is the stored array's directory.
    """

    number: int
    path: str
    first_row: int


@dataclass(frozen=True, eq=False)
class StoredArray(ReadWhenAsked):
    """Rows of dim 0 of an array in a checkpoint, which whoever uses them reads.

    `spec` says as JSON where tensorstore finds the array, `rows` which part of its dim
    0 this is; None: all. It is a chunk of a `DistributedArray`.
    """

    spec: str
    whole_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        if self.rows is None:
            return self.whole_shape
        return (self.rows[1] - self.rows[0], *self.whole_shape[1:])

    @property
    def sharding(self) -> str:
        """Where it is, in words."""
        return f"in the checkpoint {self.spec}"

    def cut(self, first: int, last: int) -> StoredArray:
        """Rows of these rows."""
        start = 0 if self.rows is None else self.rows[0]
        return replace(self, rows=(start + first, start + last))

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """The part at an index with a slice for each dim; reads nothing else.

        Raises:
          ValueError: it is not there, or cannot be read.
        """
        start = 0 if self.rows is None else self.rows[0]
        parts = [*tile_at(index, self.shape)]
        if parts:
            parts[0] = (parts[0][0] + start, parts[0][1] + start)
        store = _open(json.loads(self.spec))
        found = store[tuple(slice(*part) for part in parts)].read().result()
        return found.astype(self.dtype, copy=False)

    def values(self) -> np.ndarray:
        """All of it."""
        return self.read([slice(None)] * len(self.shape))


def stored_array(
    directory: Path, name: str, shape: tuple[int, ...], dtype: Any
) -> StoredArray:
    """An array of a checkpoint of Orbax by its joined name; reads none of it.

    Raises:
      OSError, ValueError: the directory is no such checkpoint.
    """
    metadata = json.loads((directory / "_METADATA").read_bytes())
    place: dict[str, Any] = {"driver": "file", "path": f"{directory / name}/"}
    if metadata.get("use_ocdbt"):
        base = {"driver": "file", "path": f"{directory}/"}
        place = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    spec = json.dumps({"driver": driver, "kvstore": place})
    return StoredArray(spec, shape, np.dtype(dtype))


def read_onto(stored: StoredArray, sharding: Any, dtype: Any) -> jax.Array:
    """A stored array on devices; this process reads the shards of its own, each once.

    Raises:
      ValueError: it is not there, or cannot be read.
    """
    tiles: dict[Tile, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "devices of a process have a part each"
        tile = tile_at(index, stored.shape)
        if tile not in tiles:
            tiles[tile] = stored.read(index).astype(dtype, copy=False)
        return tiles[tile]

    return jax.make_array_from_callback(stored.shape, sharding, part)


def create_array(
    path: Path, shape: Sequence[int], dtype: Any, chunks: Sequence[int]
) -> None:
    """An empty array whose files are chunks of this shape; `write_tile` fills it."""
    metadata = {
        "shape": list(shape),
        "chunks": list(chunks),
        "compressor": {"id": "zstd", "level": 1},
    }
    spec = {**_file_spec(path), "metadata": metadata, "dtype": np.dtype(dtype).name}
    _open({**spec, "create": True})


def write_tile(path: Path, tile: Tile, data: np.ndarray) -> dict[str, Digest]:
    """Write a part that is made of whole chunks; what its files hold, by their names.

    Raises:
      ValueError: the array is not there: hosts share no directory.
    """
    store = _open(_file_spec(path))
    store[tuple(slice(*part) for part in tile)].write(data).result()
    chunks = store.chunk_layout.write_chunk.shape or ()  # None for a scalar
    borders = zip(tile, chunks, strict=True)
    indices = [range(a // size, -(-b // size)) for (a, b), size in borders]
    names = [".".join(map(str, each)) or "0" for each in itertools.product(*indices)]
    return {f"{path.name}/{name}": digest_of_file(path / name) for name in names}


def moved(tile: Tile, rows: int) -> Tile:
    """A tile of a chunk that begins at some row of the whole."""
    return tuple(
        (start + rows, stop + rows) if dim == 0 else (start, stop)
        for dim, (start, stop) in enumerate(tile)
    )


def chunk_shape(tiles: Sequence[Tile]) -> tuple[int, ...]:
    """The largest chunks of which all tiles are made."""
    borders = zip(*tiles, strict=True)
    return tuple(math.gcd(*itertools.chain(*each)) or 1 for each in borders)


def digest_of_file(path: Path) -> Digest:
    """The size and SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def file_problem(path: Path, written: Digest) -> str:
    """In which way a file is not what was written, in words; empty if it is."""
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != written[0]:
        return (
            f"{path} has {path.stat().st_size} bytes, and was written with {written[0]}"
        )
    if digest_of_file(path) != written:
        return (
            f"{path} was altered after it was written: its SHA-256 is not that of the "
            f"manifest"
        )
    return ""


def _file_spec(path: Path) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "store_data_equal_to_fill_value": True,
    }


def _open(spec: dict[str, Any]) -> Any:
    import tensorstore

    return tensorstore.open(spec).result()
