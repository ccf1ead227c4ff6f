"""Arrays in checkpoints, written and read in parts."""

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.stored_arrays import (
    Tile,
    chunk_shape,
    create_array,
    digest_of_file,
    moved,
    stored_array,
    write_tile,
)

LAYOUTS: dict[str, tuple[Tile, ...]] = {
    "whole": (((0, 12), (0, 6)),),
    "rows": (((0, 6), (0, 6)), ((6, 12), (0, 6))),
    "rows and columns": tuple(
        itertools.product(((0, 6), (6, 12)), ((0, 2), (2, 4), (4, 6)))
    ),
    "uneven pieces": (((0, 8), (0, 6)), ((8, 12), (0, 3)), ((8, 12), (3, 6))),
}


def array_of(dtype: Any) -> np.ndarray:
    return np.asarray((jnp.arange(72) % 5).astype(dtype).reshape(12, 6))


def index_of(tile: Tile) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in tile)


def written(directory: Path, array: np.ndarray, tiles: tuple[Tile, ...]) -> Path:
    """An array written tile by tile, beside what Orbax says of a checkpoint."""
    (directory / "_METADATA").write_text('{"use_ocdbt": false}')
    path = directory / "w"
    create_array(path, array.shape, array.dtype, chunk_shape(tiles))
    for tile in tiles:
        digests = write_tile(path, tile, array[index_of(tile)])
        for name, digest in digests.items():
            assert digest_of_file(directory / name) == digest
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_part_is_read_of_what_was_written_in_tiles(
    tmp_path: Path, layout: str, dtype: str
):
    array = array_of(dtype)
    written(tmp_path, array, LAYOUTS[layout])
    stored = stored_array(tmp_path, "w", array.shape, array.dtype)
    np.testing.assert_array_equal(np.asarray(stored), array)
    np.testing.assert_array_equal(stored.read((slice(3, 9), slice(None))), array[3:9])
    rows = stored.cut(2, 10).cut(1, 5)
    assert rows.shape == (4, 6) and rows.dtype == array.dtype
    np.testing.assert_array_equal(
        rows.read((slice(1, 3), slice(4, 6))), array[4:6, 4:6]
    )


def test_two_tiles_share_no_file(tmp_path: Path):
    tiles = LAYOUTS["uneven pieces"]
    path = written(tmp_path, array_of("float32"), tiles)
    names = [
        set(write_tile(path, tile, array_of("float32")[index_of(tile)]))
        for tile in tiles
    ]
    assert all(not a & b for a, b in itertools.combinations(names, 2))


def test_a_scalar_has_one_file(tmp_path: Path):
    create_array(tmp_path / "count", (), np.int32, chunk_shape([()]))
    (name,) = write_tile(tmp_path / "count", (), np.asarray(7, np.int32))
    assert name == "count/0"
    (tmp_path / "_METADATA").write_text("{}")
    assert np.asarray(stored_array(tmp_path, "count", (), np.int32)) == 7


def test_zeros_are_written_too(tmp_path: Path):
    zeros = np.zeros((12, 6), np.float32)
    path = written(tmp_path, zeros, LAYOUTS["rows"])
    assert {"0.0", "1.0"} <= {file.name for file in path.iterdir()}


def test_a_piece_lies_behind_the_rows_before_it():
    assert moved(((0, 4), (2, 6)), 8) == ((8, 12), (2, 6))
    assert moved((), 8) == ()


@pytest.mark.parametrize("files", ["process", "shard"])
def test_what_orbax_wrote_is_read_in_parts(tmp_path: Path, files: Any):
    array = jnp.arange(48.0).reshape(8, 6)
    with autopar.Checkpoints(tmp_path, files=files) as checkpoints:
        checkpoints.save(0, {"layers": {"w": array}})
    stored = stored_array(tmp_path / "0", "layers.w", array.shape, array.dtype)
    np.testing.assert_array_equal(stored.read((slice(2, 4), slice(None))), array[2:4])


def test_an_array_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="gone"):
        write_tile(tmp_path / "gone", ((0, 1),), np.zeros(1, np.float32))
