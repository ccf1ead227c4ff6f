"""Rows of a batch: which of them this process needs, and how they become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path


@dataclass(frozen=True, eq=False)
class Placing:
    """Where the leaves of a batch lie.

    `size` is the leading size of every leaf; `rows` are those, ascending, that some
    device of this process holds of some leaf.
    """

    kinds: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: Any
    size: int
    rows: np.ndarray

    @classmethod
    def of(cls, like: Any) -> Placing:
        """That of a tree of jax.ShapeDtypeStruct, with shardings or without.

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
        return cls(kinds, paths, structure, size, _rows_here(kinds, size))

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

    def placed(self, leaves: Sequence[np.ndarray]) -> Any:
        """The batch, of leaves that hold `rows`, or all rows.

        Raises:
          ValueError: a leaf of another shape or dtype.
        """
        parts = zip(self.kinds, self.paths, leaves, strict=True)
        return jax.tree.unflatten(self.structure, [self._placed(*p) for p in parts])

    def _placed(self, kind: Any, path: str, leaf: np.ndarray) -> Any:
        number = leaf.shape[0] if leaf.ndim else 0
        has_all = number == self.size
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if leaf.shape[1:] != kind.shape[1:] or not (
            has_all or number == len(self.rows)
        ):
            here = "" if len(self.rows) == self.size else f" or the {len(self.rows)}"
            raise ValueError(
                f"A source gives batches of the shape that the step was planned for, "
                f"but {path} is {list(leaf.shape)} and not {list(kind.shape)}; all "
                f"{self.size} rows{here} of this process are needed: leave out a last "
                f"batch that is smaller."
            )
        if dtype != kind.dtype:
            raise ValueError(
                f"A source gives the dtypes that the step was planned for, but {path} "
                f"is {leaf.dtype} and not {kind.dtype}; convert it in the source."
            )
        if kind.sharding is None:
            return leaf.astype(dtype, copy=False)

        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(self.size)
            if not has_all:
                first, last = np.searchsorted(self.rows, (first, last))
            return leaf[(slice(first, last), *index[1:])].astype(dtype, copy=False)

        return jax.make_array_from_callback(kind.shape, kind.sharding, part)


def _rows_here(kinds: Sequence[Any], size: int) -> np.ndarray:
    is_here = np.zeros(size, bool)
    for kind in kinds:
        if kind.sharding is None:
            is_here[:] = True
            continue
        held = kind.sharding.addressable_devices_indices_map(kind.shape)
        for index in held.values():
            is_here[index[0]] = True
    return np.flatnonzero(is_here)
