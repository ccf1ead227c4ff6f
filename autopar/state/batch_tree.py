"""What a batch is: its tree, and the shape and dtype of every leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path


@dataclass(frozen=True, eq=False)
class BatchTree:
    """The leaves of a batch in their order, which share the leading size `size`.

    `kinds` are jax.ShapeDtypeStruct, with shardings or without.
    """

    kinds: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: Any
    size: int

    @classmethod
    def of(cls, like: Any) -> BatchTree:
        """That of a tree of jax.ShapeDtypeStruct.

        Raises:
          ValueError: it is empty, or its leaves share no leading size.
        """
        flat, structure = tree_flatten_with_path(like)
        sizes = {kind.shape[0] if kind.shape else None for _, kind in flat}
        size = sizes.pop() if len(sizes) == 1 else None
        if not size:
            shown = ", ".join(f"{keystr(p)} is {list(k.shape)}" for p, k in flat)
            raise ValueError(
                f"The leaves of a batch have one leading size, but {shown or 'none'}; "
                f"give the lowered step."
            )
        kinds = tuple(kind for _, kind in flat)
        paths = tuple(f"batch{keystr(path)}" for path, _ in flat)
        return cls(kinds, paths, structure, size)

    def leaves_of(self, tree: Any, what: str) -> list[Any]:
        """The leaves of a batch or an example.

        Raises:
          ValueError: its tree is not that of the batch.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ValueError(
                f"A source gives trees like the batch of the step, {self.structure}, "
                f"but {what} is {structure}."
            )
        return leaves

    def typed(self, leaf: int, rows: np.ndarray) -> np.ndarray:
        """Rows of a leaf, if each has the shape and dtype that it is to have.

        Raises:
          ValueError: it has not.
        """
        kind, path = self.kinds[leaf], self.paths[leaf]
        if rows.shape[1:] != kind.shape[1:] or not rows.ndim:
            raise ValueError(
                f"A source gives rows of the shape that the step was planned for, but "
                f"those of {path} are {list(rows.shape[1:])} and not "
                f"{list(kind.shape[1:])}."
            )
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
        if dtype != kind.dtype:
            raise ValueError(
                f"A source gives the dtypes that the step was planned for, but {path} "
                f"is {rows.dtype} and not {kind.dtype}; convert it in the source."
            )
        return rows.astype(dtype, copy=False)
