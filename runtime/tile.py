"""The part of an array that one device holds, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

Tile = tuple[tuple[int, int], ...]  # start and stop in each dim


def tile_at(index: Sequence[slice], shape: Sequence[int]) -> Tile:
    """The tile of an index, with a slice for each dim, into an array of this shape."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
