"""Sources of data that hosts of a Ray cluster read for themselves.

The driver sends a source once; a step tells only from which example on its batch is. On
a host a source is read by a thread of its own. What a step asked for of one batch is
read of the next ones, too, so that they are there when the next steps ask.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.clusters.ray_discovery import import_ray
from autopar.lowering.exported_program import ShardedType
from autopar.state.examples import Examples

from .ray_job import LoadedPart
from .ray_programs import sharding_of

_Arrays = dict[int, jax.Array]  # by the position of the input


def packed(examples: Examples) -> bytes:
    """Examples as they are sent; arrays mapped from files go as their paths.

    Raises:
      TypeError: the source cannot be pickled, or its trees are of classes that hosts
        do not know.
    """
    import_ray()
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            mapped = _as_mapped(obj) if isinstance(obj, np.ndarray) else None
            return super().reducer_override(obj) if mapped is None else mapped

    tree = examples.tree
    kinds = tuple(jax.ShapeDtypeStruct(k.shape, k.dtype) for k in tree.kinds)
    unknown = [kind for kind in _node_types(tree.structure) if _is_of_script(kind)]
    name = type(examples.source).__name__
    if unknown:
        raise TypeError(
            f"Hosts read examples that are trees of classes which they can import, but "
            f"{unknown[0].__name__} is one of the script itself; move it to a module "
            f"that is installed there, or pass on_hosts=False."
        )
    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(replace(examples, tree=replace(tree, kinds=kinds)))
    except Exception as error:
        raise TypeError(
            f"A source that hosts read is sent to them with cloudpickle, but pickling "
            f"the {name} failed: {type(error).__name__}: {error}; open files in it "
            f"where an example is read, or pass on_hosts=False."
        ) from error
    return buffer.getvalue()


def _node_types(structure: Any) -> list[type]:
    """The classes of the nodes of a tree."""
    data = structure.node_data()
    if data is None:
        return []
    inner = [each for child in structure.children() for each in _node_types(child)]
    return [data[0], *inner]


def _is_of_script(kind: type) -> bool:
    """Whether hosts cannot know how JAX takes a class apart: a namedtuple they do."""
    return kind.__module__ == "__main__" and not issubclass(kind, tuple)


def _as_mapped(array: np.ndarray) -> Any:
    """How to map an array anew where it is mapped from a file, else None."""
    whole: Any = array
    while isinstance(whole, np.ndarray) and not isinstance(whole.base, mmap.mmap):
        whole = whole.base
    if not isinstance(whole, np.memmap):
        return None
    order = "C" if whole.flags.c_contiguous else "F"
    if whole is array:
        given = whole.filename, whole.dtype, "r", whole.offset, whole.shape, order
        return np.memmap, given
    if order == "F":
        return None
    offset = array.ctypes.data - whole.ctypes.data
    return _part, (whole, array.shape, array.dtype, offset, array.strides)


def _part(whole: Any, shape: Any, dtype: Any, offset: int, strides: Any) -> np.ndarray:
    return np.ndarray(shape, dtype, whole, offset, strides)


@dataclass(frozen=True)
class Want:
    """One input of a step: which rows of which leaf of a batch, and where they lie."""

    position: int
    type: ShardedType
    leaf: int
    start: int
    stride: int

    @cached_property
    def sharding(self) -> NamedSharding:
        """Where they lie."""
        return sharding_of(self.type)

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows of the batch that devices of this host hold, ascending."""
        held = self.sharding.addressable_devices_indices_map(self.type.shape)
        return np.unique(np.concatenate([self.rows_at(i) for i in held.values()]))

    def rows_at(self, index: Any) -> np.ndarray:
        """The rows of the batch at an index into the input."""
        first, last, _ = index[0].indices(self.type.shape[0])
        return self.start + self.stride * np.arange(first, last)

    def placed(self, data: np.ndarray, rows: np.ndarray) -> jax.Array:
        """The input, of these rows of its leaf."""

        def part(index: Any) -> np.ndarray:
            at = np.searchsorted(rows, self.rows_at(index))
            is_range = at[-1] - at[0] + 1 == len(at)
            taken = slice(at[0], at[-1] + 1) if is_range else at
            return data[taken][(slice(None), *index[1:])]

        return jax.make_array_from_callback(self.type.shape, self.sharding, part)


class SourceOnHost:
    """A source of data that this host reads; see `HostSource`."""

    def __init__(self, examples: Examples, num_ahead: int, end: int | None) -> None:
        self._examples, self._num_ahead, self._end = examples, num_ahead, end
        self._threads = ThreadPoolExecutor(1, "autopar-examples")
        self._known: dict[tuple[Want, ...], tuple[Want, ...]] = {}
        self._begun: dict[tuple[tuple[Want, ...], int], Future[_Arrays]] = {}
        self._latest: dict[tuple[Want, ...], int] = {}

    @staticmethod
    def of(packed: bytes, num_ahead: int, end: int | None) -> SourceOnHost:
        """What the driver sent.

        Raises:
          ValueError: this host cannot import what it is made of.
        """
        try:
            return SourceOnHost(pickle.loads(packed), num_ahead, end)
        except Exception as error:
            raise ValueError(
                f"Hosts read a source whose modules they can import, but "
                f"{type(error).__name__}: {error}; install them there, submit the "
                f"script with its working_dir, or pass on_hosts=False to "
                f"autopar.Batches."
            ) from error

    def take(self, wants: tuple[Want, ...], first: int) -> _Arrays:
        """Inputs of the batch from an example on; the next batches are begun.

        Raises:
          Exception: what the source raised.
        """
        wants, size = self._known.setdefault(wants, wants), self._examples.tree.size
        ahead = first - self._latest.get(wants, first)
        self._latest[wants] = first
        step = ahead if ahead > 0 else size
        coming = [first + step * (i + 1) for i in range(self._num_ahead)]
        if self._end is not None:
            coming = [each for each in coming if each + size <= self._end]
        found = self._reading(wants, first)
        del self._begun[wants, first]
        stale = [k for k in self._begun if k[0] == wants and k[1] not in coming]
        for key in stale:
            self._begun.pop(key).cancel()
        for each in coming:
            self._reading(wants, each)
        return found.result()

    def close(self) -> None:
        """Read no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _reading(self, wants: tuple[Want, ...], first: int) -> Future[_Arrays]:
        key = wants, first
        if key not in self._begun:
            self._begun[key] = self._threads.submit(self._read, wants, first)
        return self._begun[key]

    def _read(self, wants: tuple[Want, ...], first: int) -> _Arrays:
        by_leaf: dict[int, np.ndarray] = {}
        for want in wants:
            before = by_leaf.get(want.leaf, want.rows)
            by_leaf[want.leaf] = np.union1d(before, want.rows)
        data = self._examples.rows(first, by_leaf)
        return {
            want.position: want.placed(data[want.leaf], by_leaf[want.leaf])
            for want in wants
        }


def taken(
    sources: Mapping[int, SourceOnHost],
    parts: Mapping[int, LoadedPart],
    types: Iterable[ShardedType],
) -> _Arrays:
    """The inputs of a step that are read from sources; types are those of all."""
    wants: dict[tuple[int, int], list[Want]] = {}
    for position, type_ in enumerate(types):
        if position in parts:
            part = parts[position]
            want = Want(position, type_, part.leaf, part.start, part.stride)
            wants.setdefault((part.source, part.first), []).append(want)
    found: _Arrays = {}
    for (source, first), each in wants.items():
        found |= sources[source].take(tuple(each), first)
    return found
