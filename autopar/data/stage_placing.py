"""Batches of a pipeline of this process: each microbatch on the stages that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..lowering.lowered_pipeline import LoweredPipeline
from ..state.distributed_array import DistributedArray
from .batch_tree import BatchTree
from .batch_types import batch_paths
from .examples import Examples
from .placing import Placing
from .stage_rows import StageRows


@dataclass(frozen=True, eq=False)
class StagePlacing:
    """Where the stages of a pipeline want the leaves of a batch.

    `homes` has for each leaf its sharding on each stage that reads it; microbatch m of
    `num_microbatches` has its rows i with i mod `num_microbatches` = m. What is read
    whole before these, by `is_read_whole`, lies on the first device besides.
    """

    whole: Placing
    num_microbatches: int
    homes: tuple[Mapping[int, NamedSharding], ...]
    is_read_whole: tuple[bool, ...]

    @classmethod
    def of(cls, lowered: LoweredPipeline, tree: BatchTree) -> StagePlacing:
        """That of the batch of a lowered step."""
        pipeline = lowered.step.pipeline
        program, paths = pipeline.program, batch_paths(lowered)
        return cls(
            Placing.of(tree),
            program.num_microbatches,
            tuple(
                {s: program.shardings[p, s] for s in pipeline.readers_of(p)}
                for p in paths
            ),
            tuple(path in pipeline.read_whole for path in paths),
        )

    @property
    def tree(self) -> BatchTree:
        """The tree of the batch."""
        return self.whole.tree

    def batch_at(self, examples: Examples, first: int) -> Any:
        """The batch from an example on."""
        return self._on_stages(self.whole.batch_at(examples, first))

    def placed(self, leaves: Sequence[np.ndarray]) -> Any:
        """The batch, of its leaves.

        Raises:
          ValueError: a leaf of another shape or dtype.
        """
        return self._on_stages(self.whole.placed(leaves))

    def _on_stages(self, batch: Any) -> Any:
        """A batch in the host's memory, copied to the stages in one call."""
        leaves = jax.tree.leaves(batch)
        keys = [
            (leaf, microbatch, stage)
            for leaf, homes in enumerate(self.homes)
            for microbatch in range(self.num_microbatches)
            for stage in homes
        ]
        number = self.num_microbatches
        copies = jax.device_put(
            [leaves[leaf][microbatch::number] for leaf, microbatch, _ in keys],
            [self.homes[leaf][stage] for leaf, _, stage in keys],
        )
        parts: list[list[dict[int, jax.Array]]] = [
            [{} for _ in range(number)] for _ in leaves
        ]
        for (leaf, microbatch, stage), copy in zip(keys, copies, strict=True):
            parts[leaf][microbatch][stage] = copy
        return jax.tree.unflatten(
            self.tree.structure,
            [
                DistributedArray((StageRows(whole, tuple(each)),))
                for whole, each in zip(self._wholes(leaves), parts, strict=True)
            ],
        )

    def _wholes(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        return [
            jax.device_put(leaf) if is_read else leaf
            for leaf, is_read in zip(leaves, self.is_read_whole, strict=True)
        ]
