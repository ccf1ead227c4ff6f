"""State in files mapped into memory: for what neither devices nor host memory hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .distributed_array import DistributedArray


class MemmapStore:
    """Keeps the leaves of a tree in files of one folder, between steps of training.

        store = autopar.MemmapStore("/nvme/moments")
        params, moments = state
        for batch in batches:
            (params, moments), loss = step((params, store.keep(moments)), batch)

    A step reads the files through the page cache, the part of each device for itself.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, np.memmap[Any, Any]] = {}

    def keep(self, tree: Any) -> Any:
        """The same tree with its arrays in files; what was there is written over.

        Scalars, PRNG keys and what is no array stay as they are. No array is put
        together: each device's part is written for itself.

        Raises:
          TypeError: a leaf on other hosts, whose parts are not here.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        kept = [self._keep(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        return jax.tree.unflatten(structure, kept)

    def _keep(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, DistributedArray):
            raise TypeError(
                f"A memmap store keeps arrays of this process, but {path} is "
                f"{leaf}; save it with autopar.save."
            )
        if not isinstance(leaf, jax.Array | np.ndarray) or not leaf.ndim:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        file = self._file(path, leaf.shape, np.dtype(leaf.dtype))
        if leaf is file:
            return file
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    file[shard.index] = np.asarray(shard.data)
        else:
            file[...] = leaf
        file.flush()
        return file

    def _file(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.memmap[Any, Any]:
        found = self._files.get(path)
        if found is None or (found.shape, found.dtype) != (shape, dtype):
            name = f"{len(self._files)}.bin"
            found = np.memmap(self.folder / name, dtype, "w+", shape=shape)
            self._files[path] = found
        return found
