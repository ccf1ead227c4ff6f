"""The batch of a lowered step as shapes, with the shardings of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ..lowering.lowered_pipeline import LoweredPipeline
from ..lowering.lowered_step import Lowered


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


def batch_paths(lowered: Lowered | LoweredPipeline) -> list[str]:
    """The path of each leaf of the batch, in the order of `batch_types`."""
    return jax.tree.leaves(_of_batch(lowered, lowered.traced.input_paths))


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
