"""Save a state with Orbax, and restore it into the shardings of any other plan.

A checkpoint is an ordinary one of Orbax: nested dicts by the names in a leaf's path,
every leaf whole, whatever meshes or chunks it was saved from. Orbax writes into a
temporary directory and renames it, so one that was not finished is never taken for one.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from autopar.lowering.programs import weakly_typed
from autopar.state.distributed_array import AbstractDistributedArray, DistributedArray

from .ray_arrays import RemoteArray, is_on_workers
from .ray_checkpoints import remote_handler
from .stored_arrays import Digest, StoredArray, read_onto, stored_array

Names = tuple[str, ...]
NUMBERS = (bool, int, float, complex)
ABSTRACT = (jax.ShapeDtypeStruct, AbstractDistributedArray)
_VALUES = (jax.Array, DistributedArray, np.ndarray, np.generic, *NUMBERS)
_BARE = ("state",)  # the name of a state that is one leaf
_IN_CHUNKS = (DistributedArray, AbstractDistributedArray)
MARK = {"autopar": {"format": 1}}
UNFINISHED = ".orbax-checkpoint-tmp"
_SHOWN = 3


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write a state to a new directory, as a checkpoint of Orbax.

    Each array is written by the devices that hold it; those of other hosts must share
    the directory, and one in uneven chunks goes through this process. What is neither
    array nor number (a module's functions) is left out.

    Args:
      path: the directory, which may not exist yet.
      state: any tree of arrays, DistributedArrays, numbers and PRNG keys.

    Raises:
      ImportError: Orbax is not installed.
      FileExistsError: the directory exists.
      TypeError: a leaf is a shape only.
      ValueError: there is nothing to save, or two leaves have one name.
      RuntimeError: an array was donated or deleted.
    """
    orbax = import_orbax("autopar.save")
    directory = _absolute(path)
    stored = stored_leaves(state)
    if not _is_remote(directory) and Path(directory).exists():
        raise FileExistsError(
            f"A checkpoint is written to a directory of its own, but {directory} "
            f"exists; name it by the step, or remove it first."
        )
    handler, arguments = orbax_save(stored, {})
    with orbax.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, args=arguments, custom_metadata=MARK)


def orbax_save(
    stored: Mapping[Names, Any], digests: dict[str, Digest], is_ocdbt: bool = True
) -> tuple[Any, Any]:
    """What Orbax writes leaves with, and what it is given.

    `digests` gets the files that workers write, by their path in the checkpoint.
    """
    orbax = import_orbax("autopar.save")
    tree = nested({names: _stored_form(leaf) for names, leaf in stored.items()})
    if any(map(is_on_workers, stored.values())):
        return remote_handler(orbax, digests), orbax.args.PyTreeSave(tree)
    handler = orbax.StandardCheckpointHandler(use_ocdbt=is_ocdbt)
    return handler, orbax.args.StandardSave(tree)


def stored_leaves(state: Any) -> dict[Names, Any]:
    """What a checkpoint of a state holds, by name.

    Raises:
      TypeError: a leaf is a shape only.
      ValueError: there is nothing to save, or two leaves have one name.
      RuntimeError: an array was donated or deleted.
    """
    leaves = NamedLeaves(state)
    stored = _with_elements(leaves)
    if not stored:
        raise ValueError(
            f"A checkpoint holds arrays and numbers, but a {type(state).__name__} "
            f"without any was given; pass the state that a step returns."
        )
    _check_readable(leaves.paths, stored)
    return stored


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """The state that `save`, or Orbax itself, wrote to a directory.

    Each device reads its own part of an array only; that is so for one in chunks, too,
    but from a bucket. Other hosts read theirs when a step first takes them.

    Args:
      path: the directory.
      like: a tree as it was saved, whose leaves say where each array goes: arrays or
        jax.ShapeDtypeStruct with the shardings of any mesh, DistributedArrays, numpy
        arrays and numbers. `step.abstract_state(...)` gives that of a plan. A shape
        without sharding stands for a numpy array; what is no array is kept.

    Raises:
      ImportError: Orbax is not installed.
      FileNotFoundError: no such directory.
      ValueError: it holds no finished checkpoint, or leaves of other names, shapes or
        dtypes.
    """
    orbax = import_orbax("autopar.restore")
    directory = _absolute(path)
    wanted = NamedLeaves(like)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        stored = _stored_tree(checkpointer, directory)
        read = _with_elements(wanted)
        has = {".".join(n): kind for n, kind in leaves_by_names(stored).items()}
        check_alike(directory, wanted, has)
        in_chunks = _read_in_chunks(directory, read)

        def item(path: Any, kind: Any) -> Any:
            return orbax.PLACEHOLDER if names_of(path) in in_chunks else kind

        asked = tree_map_with_path(
            lambda path, _: _restore_args(orbax, read[names_of(path)]),
            stored,
            is_leaf=is_array,
        )
        arguments = orbax.args.PyTreeRestore(
            item=tree_map_with_path(item, stored, is_leaf=is_array), restore_args=asked
        )
        here = checkpointer.restore(directory, args=arguments)
        found = {**leaves_by_names(here), **in_chunks}
    return wanted.replaced(
        {
            names: _placed(found[names], leaf, wanted.paths[names])
            if names in read
            else _empty(leaf)
            for names, leaf in wanted.by_names.items()
        }
    )


def _with_elements(leaves: NamedLeaves) -> dict[Names, Any]:
    """All leaves but empty arrays, which no checkpoint holds."""
    return {n: x for n, x in leaves.by_names.items() if _size(x)}


def _stored_form(leaf: Any) -> Any:
    """A leaf as Orbax takes it: one in chunks here is put together on this host."""
    if not isinstance(leaf, DistributedArray) or is_on_workers(leaf):
        return leaf
    is_whole = len(leaf.chunks) == 1 and isinstance(leaf.chunks[0], jax.Array)
    return leaf.chunks[0] if is_whole else np.asarray(leaf)


def _check_readable(paths: Mapping[Names, str], leaves: Mapping[Names, Any]) -> None:
    for names, leaf in leaves.items():
        if isinstance(leaf, ABSTRACT):
            raise TypeError(
                f"A checkpoint holds values, but {paths[names]} is {leaf}; pass arrays."
            )
        if isinstance(leaf, jax.Array | DistributedArray) and leaf.is_deleted():
            raise RuntimeError(
                f"An array can be saved until it is donated or deleted, but "
                f"{paths[names]} was; save the state that the last step returned."
            )


def _stored_tree(checkpointer: Any, directory: str) -> Any:
    """The tree of a checkpoint with the type of each array in its place."""
    if not _is_remote(directory) and not Path(directory).exists():
        raise FileNotFoundError(
            f"A checkpoint is a directory that autopar.save wrote, but {directory} is "
            f"not there."
        )
    metadata = None
    if UNFINISHED not in directory:
        with suppress(NotADirectoryError, KeyError, ValueError):
            metadata = checkpointer.metadata(directory).item_metadata
    if metadata is None:
        raise ValueError(
            f"A checkpoint is a directory that autopar.save or Orbax wrote to its end, "
            f"but {directory} is none; one that was cut off has {UNFINISHED} in its "
            f"name, and is to be removed."
        )
    return metadata.tree


def check_alike(directory: str, like: NamedLeaves, stored: Mapping[str, Any]) -> None:
    """Does nothing if a checkpoint with leaves of these joined names fits `like`.

    Raises:
      ValueError: leaves differ in name, shape or dtype.
    """
    leaves = _with_elements(like).items()
    wanted = {".".join(names): (like.paths[names], leaf) for names, leaf in leaves}
    missing = [path for name, (path, _) in wanted.items() if name not in stored]
    extra = [name for name in stored if name not in wanted]
    if missing or extra:
        notes = [f"lacks {_some(missing)}"] * bool(missing)
        notes += [f"holds {_some(extra)} besides"] * bool(extra)
        raise ValueError(
            f"`like` must be the tree that was saved, but the checkpoint {directory} "
            f"{' and '.join(notes)}; give a tree with these leaves and no others."
        )
    for name, (path, leaf) in wanted.items():
        (shape, dtype), has = data_type(leaf), stored[name]
        has_shape, has_dtype = tuple(has.shape), np.dtype(has.dtype)
        if shape != has_shape:
            raise ValueError(
                f"`like` must have the shapes that were saved, but {path} is "
                f"{list(shape)} and was saved as {list(has_shape)} in {directory}."
            )
        is_number = isinstance(leaf, NUMBERS) or getattr(leaf, "weak_type", False)
        if dtype != has_dtype and not (is_number and dtype.kind == has_dtype.kind):
            raise ValueError(
                f"`like` must have the dtypes that were saved, but {path} is "
                f"{dtype.name} and was saved as {has_dtype.name} in {directory}; "
                f"restore it as that, and convert it afterwards."
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return ", ".join(names[:_SHOWN]) + more


def data_type(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of what is stored of a leaf: of a key its data."""
    if isinstance(leaf, NUMBERS):
        return (), np.asarray(leaf).dtype
    if _is_key(leaf):
        kind = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        leaf = jax.eval_shape(jax.random.key_data, kind)
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def _restore_args(orbax: Any, leaf: Any) -> Any:
    """How Orbax reads a leaf: onto its devices, or into this process."""
    sharding = getattr(leaf, "sharding", None)
    if _has_devices(sharding):
        return orbax.ArrayRestoreArgs(sharding=sharding, restore_type=jax.Array)
    if isinstance(leaf, NUMBERS):
        return orbax.RestoreArgs(restore_type=type(leaf))
    if _is_key(leaf):
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return orbax.ArrayRestoreArgs(sharding=one, restore_type=jax.Array)
    return orbax.RestoreArgs(restore_type=np.ndarray)


def _placed(value: Any, like: Any, path: str) -> Any:
    """What was read of a leaf, in the type and place of `like`.

    Raises:
      ValueError: a key of another implementation.
    """
    if isinstance(value, DistributedArray):
        return value
    if isinstance(like, NUMBERS):
        return type(like)(value)
    if isinstance(like, np.generic):
        return like.dtype.type(value)
    if isinstance(like, _IN_CHUNKS):
        return _in_chunks(np.asarray(value), like)
    if _is_key(like):
        if not _is_key(value):  # raw data, as older code saved it
            return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
        if value.dtype != like.dtype:
            raise ValueError(
                f"`like` must have the keys that were saved, but {path} is "
                f"{like.dtype} and was saved as {value.dtype}."
            )
    if getattr(like, "weak_type", False):
        return weakly_typed(jax.numpy.asarray(value, like.dtype))
    return value


def _read_in_chunks(
    directory: str, wanted: Mapping[Names, Any]
) -> dict[Names, DistributedArray]:
    """The leaves in chunks, and those that other hosts read at the next step."""
    found: dict[Names, DistributedArray] = {}
    for names, leaf in wanted.items() if not _is_remote(directory) else ():
        chunks = leaf.chunks if isinstance(leaf, _IN_CHUNKS) else (leaf,)
        homes = [getattr(chunk, "sharding", None) for chunk in chunks]
        is_here = isinstance(leaf, _IN_CHUNKS) and all(map(_has_devices, homes))
        if _is_key(leaf) or not (is_here or all(map(_is_elsewhere, chunks))):
            continue
        name, (shape, dtype) = ".".join(names), data_type(leaf)
        parts: list[Any] = [stored_array(Path(directory), name, shape, dtype)]
        if len(chunks) > 1:
            ends = itertools.accumulate((p.shape[0] for p in chunks), initial=0)
            parts = [parts[0].cut(*rows) for rows in itertools.pairwise(ends)]
        if is_here:
            places = zip(parts, homes, strict=True)
            parts = [read_onto(part, home, dtype) for part, home in places]
        found[names] = DistributedArray(parts)
    return found


def _is_elsewhere(chunk: Any) -> bool:
    """Whether a chunk of a leaf lies, or is to lie, on other hosts."""
    if isinstance(chunk, RemoteArray | StoredArray):
        return True
    return isinstance(getattr(chunk, "sharding", None), jax.sharding.Sharding) and (
        not _has_devices(chunk.sharding)
    )


def _has_devices(sharding: Any) -> bool:
    """Whether arrays of a sharding can be made here: not those of a Ray cluster."""
    is_one = isinstance(sharding, jax.sharding.Sharding)
    return is_one and not isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _in_chunks(whole: np.ndarray, like: Any) -> Any:
    """An array of a bucket in the chunks of `like`; whole if some lie elsewhere."""
    shardings = [chunk.sharding for chunk in like.chunks]
    if not all(map(_has_devices, shardings)):
        return whole  # the step that takes it moves it there
    ends = itertools.accumulate(chunk.shape[0] for chunk in like.chunks[:-1])
    parts = np.split(whole, [*ends]) if len(shardings) > 1 else [whole]
    return DistributedArray([*map(jax.device_put, parts, shardings)])


def _empty(leaf: Any) -> Any:
    """An array of no elements, which no checkpoint holds."""
    zeros = np.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    return jax.device_put(zeros, sharding) if _has_devices(sharding) else zeros


def _size(leaf: Any) -> int:
    return 1 if isinstance(leaf, NUMBERS) else math.prod(leaf.shape)


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _absolute(path: str | os.PathLike[str]) -> str:
    """The path as Orbax wants it; that of a bucket is absolute already."""
    name = os.fspath(path)
    return name if _is_remote(name) else os.path.abspath(name)


def _is_remote(path: str) -> bool:
    return "://" in path


def import_orbax(name: str) -> Any:
    """The package `orbax.checkpoint`, which `name` needs.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(
            f"{name} writes and reads checkpoints with Orbax, which is not "
            f"installed; pip install 'autopar[checkpoint]'."
        ) from error
    return orbax


class NamedLeaves:
    """The arrays and numbers of a tree by name, and how they are put back.

    NNX modules are taken as graphs, so that a variable in two places is one leaf.
    """

    def __init__(self, tree: Any) -> None:
        tree, self._finish = _without_modules(tree)
        flat, self._structure = tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in flat]
        self._positions: dict[Names, int] = {}
        self.paths: dict[Names, str] = {}
        joined: dict[str, str] = {}
        for position, (path, leaf) in enumerate(flat):
            if not isinstance(leaf, (*_VALUES, *ABSTRACT)):
                continue
            names, shown = names_of(path) or _BARE, keystr(path) or "the state"
            name = ".".join(names)  # as Orbax writes it
            if name in joined:
                raise ValueError(
                    f"Leaves are saved by the names in their paths, but {joined[name]} "
                    f"and {shown} are both called {name!r}; rename a key."
                )
            joined[name] = shown
            self._positions[names], self.paths[names] = position, shown

    @property
    def by_names(self) -> dict[Names, Any]:
        return {n: self._leaves[position] for n, position in self._positions.items()}

    def replaced(self, by_names: Mapping[Names, Any]) -> Any:
        """The tree with other arrays."""
        leaves = list(self._leaves)
        for names, position in self._positions.items():
            leaves[position] = by_names[names]
        return self._finish(jax.tree.unflatten(self._structure, leaves))


def _without_modules(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A tree without NNX modules, and what puts them back; does not import flax."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree, lambda same: same

    def is_module(node: Any) -> bool:
        return nnx.graph.is_graph_node(node)

    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        return tree, lambda same: same
    graph, state = nnx.split(tree)

    def merged(pure: Any) -> Any:
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(graph, state)

    return nnx.to_pure_dict(state), merged


def _name(key: Any) -> str:
    """A key of a path as Orbax names it."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def nested(by_names: Mapping[Names, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for names, leaf in by_names.items():
        node = tree
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = leaf
    return tree


def names_of(path: Iterable[Any]) -> Names:
    return tuple(map(_name, path))


def leaves_by_names(tree: Any) -> dict[Names, Any]:
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_array)
    return {names_of(path): leaf for path, leaf in flat}


def is_array(node: Any) -> bool:
    """Whether a node of what Orbax read is an array, or says its type."""
    return hasattr(node, "dtype")
