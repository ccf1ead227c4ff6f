"""Values that no single `jax.Array` can hold, and how to get at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@runtime_checkable
class ArrayChunk(Protocol):
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


class ReadWhenAsked:
    """A chunk whose values lie elsewhere and are read when they are wanted."""

    def values(self) -> np.ndarray:
        """All of it."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.values()
        return whole if dtype is None else whole.astype(dtype)

    def block_until_ready(self) -> Any:
        """Does nothing: there is nothing to wait for."""
        return self

    def is_deleted(self) -> bool:
        """Never: it can be read again."""
        return False

    def delete(self) -> None:
        """Does nothing: this process does not hold it."""


class _InChunks:
    """What `chunks` are that follow each other along dim 0."""

    chunks: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        first = tuple(self.chunks[0].shape)
        if len(self.chunks) == 1:
            return first
        return (sum(chunk.shape[0] for chunk in self.chunks), *first[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of every chunk."""
        return self.chunks[0].dtype

    @property
    def sharding(self) -> tuple[Any, ...]:
        """The sharding of each chunk."""
        return tuple(chunk.sharding for chunk in self.chunks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_kind(self)}: {_places(self.chunks)})"


class DistributedArray(_InChunks):
    """An array of remote hosts, or of chunks that lie on different meshes.

    Its `chunks` follow each other along dim 0. Pass it back to a parallelized function,
    which leaves it where it lies; `autopar.fetch` and `numpy.asarray` copy it to this
    process. Of JAX's own functions `jax.numpy.asarray` copies it to one device, and the
    others raise a TypeError.

    Raises:
      ValueError: chunks of different dtypes, or whose shapes differ past dim 0.
    """

    def __init__(self, chunks: Sequence[ArrayChunk]) -> None:
        _check_alike(chunks)
        self.chunks = tuple(chunks)

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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.is_deleted():
            raise RuntimeError(
                f"The values of an array can be read until it is donated or deleted, "
                f"but {_kind(self)} was; use the state that the last step returned."
            )
        parts = [np.asarray(chunk) for chunk in self.chunks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole if dtype is None else whole.astype(dtype)

    def item(self) -> Any:
        """The value of an array of one element, as a Python number."""
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def block_until_ready(self) -> DistributedArray:
        """Wait until every chunk is computed."""
        for chunk in self.chunks:
            chunk.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """Whether its memory was donated to a step, or freed."""
        return any(chunk.is_deleted() for chunk in self.chunks)

    def delete(self) -> None:
        """Free its memory on all devices."""
        for chunk in self.chunks:
            chunk.delete()


@dataclass(frozen=True, repr=False)
class AbstractDistributedArray(_InChunks):
    """The shapes and shardings of a `DistributedArray`, without data.

    It stands for one where a jax.ShapeDtypeStruct stands for a jax.Array.

    Raises:
      ValueError: chunks of different dtypes, or whose shapes differ past dim 0.
    """

    chunks: tuple[jax.ShapeDtypeStruct, ...]

    def __post_init__(self) -> None:
        _check_alike(self.chunks)


def fetch(tree: Any) -> Any:
    """A tree with every array copied to this process, as numpy arrays.

    Other leaves stay as they are. Copies of all arrays start before any is waited for.
    """
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        chunks: Sequence[Any] = getattr(leaf, "chunks", (leaf,))
        for array in chunks if isinstance(leaf, DistributedArray) else (leaf,):
            is_values = isinstance(array, jax.Array) and not _is_key(array)
            if is_values and not array.is_deleted():
                array.copy_to_host_async()
    return jax.tree.unflatten(structure, [_fetched(leaf) for leaf in leaves])


def abstract_leaf(leaf: Any) -> Any:
    """What stands for a leaf in a trace: a shape in place of what JAX does not take."""
    if isinstance(leaf, DistributedArray | AbstractDistributedArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def signature(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a leaf that holds values, as JAX takes it."""
    if isinstance(leaf, DistributedArray | jax.Array):
        return leaf.shape, leaf.dtype
    kind = jax.typeof(leaf)
    return kind.shape, kind.dtype


def gathered(leaf: Any, home: jax.sharding.Sharding) -> Any:
    """A leaf as JAX takes it: a DistributedArray as one array that lies at `home`."""
    if not isinstance(leaf, DistributedArray):
        return leaf
    if len(leaf.chunks) == 1 and isinstance(leaf.chunks[0], jax.Array):
        return jax.device_put(leaf.chunks[0], home)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, home, lambda index: whole[index])


def _fetched(leaf: Any) -> Any:
    if isinstance(leaf, DistributedArray):
        return np.asarray(leaf)
    if isinstance(leaf, jax.Array) and not _is_key(leaf):
        return np.asarray(leaf)
    return leaf


def _is_key(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _check_alike(chunks: Sequence[Any]) -> None:
    if not chunks:
        raise ValueError("A DistributedArray needs a chunk, but got none.")
    if len(chunks) == 1:
        return
    kinds = {(tuple(chunk.shape[1:]), np.dtype(chunk.dtype)) for chunk in chunks}
    if len(kinds) > 1 or not all(chunk.shape for chunk in chunks):
        shapes = ", ".join(f"{p.dtype}{list(p.shape)}" for p in chunks)
        raise ValueError(
            f"Chunks of a DistributedArray are joined along dim 0, so they must be "
            f"alike but for that, and got {shapes}."
        )


def _kind(array: _InChunks) -> str:
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _places(chunks: Sequence[Any]) -> str:
    if len(chunks) == 1:
        return str(chunks[0].sharding)
    return ", ".join(f"[{chunk.shape[0]}] on {chunk.sharding}" for chunk in chunks)
