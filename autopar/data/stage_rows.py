"""A leaf of a batch whose microbatches lie on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..state.distributed_array import DistributedArray


@dataclass(frozen=True, eq=False)
class StageRows:
    """Rows of one leaf, and the microbatches that are cut from them in their places.

    `parts[m]` has the rows of microbatch m by the stage that reads them. It is a piece
    of a `DistributedArray`.
    """

    rows: np.ndarray | jax.Array
    parts: tuple[Mapping[int, jax.Array], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype."""
        return np.dtype(self.rows.dtype)

    @property
    def sharding(self) -> str:
        """Where it is, in words."""
        stages = ", ".join(map(str, sorted(self.parts[0]))) or "none"
        return f"{len(self.parts)} microbatches on stages {stages}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.asarray(self.rows)
        return whole if dtype is None else whole.astype(dtype)

    def block_until_ready(self) -> StageRows:
        """Wait until every microbatch is where it is read."""
        jax.block_until_ready([*map(dict, self.parts)])
        return self

    def is_deleted(self) -> bool:
        """Whether its memory on the stages was freed."""
        return any(x.is_deleted() for part in self.parts for x in part.values())

    def delete(self) -> None:
        """Free its memory on the stages."""
        for array in (x for part in self.parts for x in part.values()):
            array.delete()


def stage_rows(leaf: Any) -> StageRows | None:
    """What a leaf is made of if it was placed for the stages of a pipeline."""
    piece = leaf.pieces[0] if isinstance(leaf, DistributedArray) else None
    return piece if isinstance(piece, StageRows) else None


def microbatches_on(
    leaf: Any, number: int, stages: Collection[int]
) -> list[Mapping[int, jax.Array]]:
    """The microbatches of a leaf, each by stage.

    Empty unless the leaf was placed as so many, and for all of these stages.
    """
    found = stage_rows(leaf)
    if found is None or len(found.parts) != number:
        return []
    return list(found.parts) if set(stages) <= found.parts[0].keys() else []
