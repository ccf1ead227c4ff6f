"""Sources of data that hosts of a Ray cluster read for themselves.

The driver sends a source once; a step tells only from which example on its batch is.
"""

from __future__ import annotations

import io
import logging
import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np

from autopar.data.examples import Examples, HostSource

from .ray_hosts import import_ray

_log = logging.getLogger("autopar")
# Under which number each group of hosts has a source.
SourceNumbers = weakref.WeakKeyDictionary[HostSource, dict[int, int]]


class Readers(Protocol):
    """The workers that read sources."""

    sources: SourceNumbers

    def ranks_of(self, group: int) -> range: ...
    def fresh_numbers(self, count: int) -> range: ...
    def forget(self, number: int, group: int) -> None: ...
    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> Sequence[Any]: ...


def source_number(workers: Readers, source: HostSource, group: int) -> int:
    """The number under which a group of hosts has a source, which is sent if new.

    They forget it when it is collected here.

    Raises:
      WorkerError: a host cannot import what it is made of.
      HostLostError, RuntimeError: see `Workers.call`.
    """
    numbers = workers.sources.setdefault(source, {})
    if group not in numbers:
        (number,) = workers.fresh_numbers(1)
        given = number, source.packed, source.num_ahead, source.end
        workers.call("open_source", dict.fromkeys(workers.ranks_of(group), given))
        numbers[group] = number
        weakref.finalize(source, _forget, weakref.ref(workers), number, group)
        name = type(source.examples.source).__name__
        what = f"a {name} of {len(source.packed)} bytes"
        _log.info("hosts of group %d read examples from %s", group, what)
    return numbers[group]


def _forget(workers: weakref.ref[Readers], number: int, group: int) -> None:
    if (found := workers()) is not None:
        found.forget(number, group)


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
