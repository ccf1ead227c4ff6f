"""Values that no single `jax.Array` can hold, and how to get at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@runtime_checkable
class ArrayPiece(Protocol):
    """What a `DistributedArray` is made of: a `jax.Array`, or one of another host."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def sharding(self) -> Any: ...
    def __array__(self, dtype: Any = None) -> np.ndarray: ...
    def block_until_ready(self) -> Any: ...
    def is_deleted(self) -> bool: ...
    def delete(self) -> None: ...


class DistributedArray:
    """An array of remote hosts, or of pieces that lie on different meshes.

    Its `pieces` follow each other along dim 0. Pass it back to a parallelized function,
    which leaves it where it lies; `autopar.fetch` and `numpy.asarray` copy it to this
    process. JAX's own functions do not take it.

    Raises:
      ValueError: pieces of different dtypes, or whose shapes differ past dim 0.
    """

    def __init__(self, pieces: Sequence[ArrayPiece]) -> None:
        if not pieces:
            raise ValueError("A DistributedArray needs a piece, but got none.")
        kinds = {(piece.shape[1:], np.dtype(piece.dtype)) for piece in pieces}
        if len(kinds) > 1 or (len(pieces) > 1 and not all(p.shape for p in pieces)):
            shapes = ", ".join(f"{p.dtype}{list(p.shape)}" for p in pieces)
            raise ValueError(
                f"Pieces of a DistributedArray are joined along dim 0, so they must be "
                f"alike but for that, and got {shapes}."
            )
        self.pieces = tuple(pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        first = self.pieces[0].shape
        if len(self.pieces) == 1:
            return tuple(first)
        return (sum(piece.shape[0] for piece in self.pieces), *first[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of every piece."""
        return self.pieces[0].dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the whole."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def sharding(self) -> tuple[Any, ...]:
        """The sharding of each piece."""
        return tuple(piece.sharding for piece in self.pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [np.asarray(piece) for piece in self.pieces]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole if dtype is None else whole.astype(dtype)

    def block_until_ready(self) -> DistributedArray:
        """Wait until every piece is computed."""
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """Whether its memory was donated to a step, or freed."""
        return any(piece.is_deleted() for piece in self.pieces)

    def delete(self) -> None:
        """Free its memory on all devices."""
        for piece in self.pieces:
            piece.delete()

    def __repr__(self) -> str:
        kind = f"{np.dtype(self.dtype).name}{list(self.shape)}"
        places = ", ".join(
            f"[{piece.shape[0]}] on {piece.sharding}"
            if len(self.pieces) > 1
            else str(piece.sharding)
            for piece in self.pieces
        )
        return f"DistributedArray({kind}: {places})"


def fetch(tree: Any) -> Any:
    """A tree with every array copied to this process, as numpy arrays.

    Other leaves stay as they are. Copies of all arrays start before any is waited for.
    """
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        for array in leaf.pieces if isinstance(leaf, DistributedArray) else (leaf,):
            if isinstance(array, jax.Array) and not _is_key(array):
                array.copy_to_host_async()
    return jax.tree.unflatten(structure, [_fetched(leaf) for leaf in leaves])


def _fetched(leaf: Any) -> Any:
    if isinstance(leaf, DistributedArray):
        return np.asarray(leaf)
    if isinstance(leaf, jax.Array) and not _is_key(leaf):
        return np.asarray(leaf)
    return leaf


def _is_key(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def abstract_leaf(leaf: Any) -> Any:
    """What stands for a leaf in a trace: a shape in place of what JAX does not take."""
    if isinstance(leaf, DistributedArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf
