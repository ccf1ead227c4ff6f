"""Where the batch of a step lies: its types, its rows of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..state.batch_tree import BatchTree
from ..state.examples import Examples
from ..steps.lowered_pipeline import LoweredPipeline
from ..steps.lowered_step import Lowered


def is_on_hosts(lowered: Lowered | LoweredPipeline) -> bool:
    """Whether a step runs on the hosts of a Ray cluster."""
    if isinstance(lowered, LoweredPipeline):
        return lowered.step.pipeline.planned.cluster.ray_hosts is not None
    return not isinstance(lowered.program.mesh, Mesh)


def batch_types(lowered: Lowered | LoweredPipeline) -> Any:
    """The argument that is the batch, a tuple of several, or a dict of them by name.

    Leaves are jax.ShapeDtypeStruct. Those of a pipeline, which cuts its batch before
    it sends a part to each stage, and of other hosts have no sharding.

    Raises:
      ValueError: no argument is a batch, or some are given by position and some by
        keyword.
    """
    avals = lowered.traced.jaxpr.in_avals
    shardings: Sequence[Any] = [None] * len(avals)
    loops = (
        lowered.step.pipeline.planned.updates
        if isinstance(lowered, LoweredPipeline)
        else ()
    )
    shapes = [
        (*(len(loop.order) for loop in loops if leaf in loop.sliced), *aval.shape)
        for leaf, aval in enumerate(avals)
    ]
    if isinstance(lowered, Lowered) and not is_on_hosts(lowered):
        shardings = lowered.program.shardings
    kinds = [
        jax.ShapeDtypeStruct(shape, aval.dtype, sharding=home)
        for shape, aval, home in zip(shapes, avals, shardings, strict=True)
    ]
    return _of_batch(lowered, kinds)


def _of_batch(lowered: Lowered | LoweredPipeline, leaves: Sequence[Any]) -> Any:
    """Of what stands for the leaves of a call, the arguments of the batch."""
    traced = lowered.traced
    if isinstance(lowered, LoweredPipeline):
        paths = set(lowered.step.pipeline.parts.batch)
    else:
        paths = {i.path for i in lowered.graph.inputs if i.role == "batch"}
    is_batch = [path in paths for path in traced.input_paths]
    args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
    arg_flags, kwarg_flags = jax.tree.unflatten(traced.in_tree, is_batch)
    found = tuple(
        arg
        for arg, flags in zip(args, arg_flags, strict=True)
        if any(jax.tree.leaves(flags))
    )
    named = {n: kwargs[n] for n in kwargs if any(jax.tree.leaves(kwarg_flags[n]))}
    if bool(found) == bool(named):
        raise ValueError(
            f"The batch is given by position or by keyword, but {traced.name} takes "
            f"{len(found)} arguments of it by position and {sorted(named)} by keyword; "
            f"say which they are with batch_argnums=."
        )
    return named or (found[0] if len(found) == 1 else found)


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
