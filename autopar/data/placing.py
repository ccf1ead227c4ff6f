"""Rows of a batch: which of them this process needs, and how they become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .batch_tree import BatchTree
from .examples import Examples


@dataclass(frozen=True, eq=False)
class Placing:
    """Where the leaves of a batch lie.

    `rows` are those, ascending, that some device of this process holds of some leaf.
    """

    tree: BatchTree
    rows: np.ndarray

    @classmethod
    def of(cls, tree: BatchTree) -> Placing:
        """That of a batch by the shardings of its leaves; all rows of one without."""
        return cls(tree, _rows_here(tree.kinds, tree.size))

    def batch_at(self, examples: Examples, first: int) -> Any:
        """The batch from an example on."""
        numbers = range(len(self.tree.kinds))
        leaves = examples.rows(first, dict.fromkeys(numbers, self.rows))
        return self.placed([leaves[i] for i in numbers])

    def placed(self, leaves: Sequence[np.ndarray]) -> Any:
        """The batch, of leaves that hold `rows`, or all rows.

        Raises:
          ValueError: a leaf of another shape or dtype.
        """
        placed = [self._placed(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(self.tree.structure, placed)

    def _placed(self, number: int, leaf: np.ndarray) -> Any:
        tree = self.tree
        kind, size = tree.kinds[number], tree.size
        found = leaf.shape[0] if leaf.ndim else 0
        if leaf.shape[1:] != kind.shape[1:] or found not in (size, len(self.rows)):
            here = "" if len(self.rows) == size else f" or the {len(self.rows)}"
            raise ValueError(
                f"A source gives batches of the shape that the step was planned for, "
                f"but {tree.paths[number]} is {list(leaf.shape)} and not "
                f"{list(kind.shape)}; all {size} rows{here} of this process are "
                f"needed: leave out a last batch that is smaller."
            )
        typed = tree.typed(number, leaf)
        if kind.sharding is None:
            return typed

        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(size)
            if found != size:
                first, last = np.searchsorted(self.rows, (first, last))
            return typed[(slice(first, last), *index[1:])]

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
