"""What the devices of a mesh can share, and what they repeat."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from ..errors import FallbackWarning
from ..graph.op_graph import OpGraph
from ..graph.work import heavy_rows
from ..plans.plan import OperatorPlan, ShardingPlan
from ..sharding.mesh import MeshShape

# What is there, or is done, this many times more than it need be.
_NOTABLE = 1.5


def split_fraction(
    graph: OpGraph, operators: Sequence[OperatorPlan], mesh: MeshShape
) -> float:
    """The part of the heavy flops that no two devices of a mesh do twice."""
    heavy = [operators[row] for row in heavy_rows(graph.columns).tolist()]
    flops = sum(work.flops for work in heavy)
    split = sum(work.flops for work in heavy if work.split == mesh.size)
    return split / flops if flops else 1.0


def warn_repeated_work(
    graph: OpGraph, plan: ShardingPlan, batch: Sequence[int]
) -> None:
    """Says how often devices repeat the heavy work of a step, where they do.

    `batch` are the tensors whose dim 0 is the batch.
    """
    heavy = [plan.operators[row] for row in heavy_rows(graph.columns).tolist()]
    whole = sum(op.flops for op in heavy)
    each = sum(op.flops / op.split for op in heavy)
    number = plan.mesh.size
    if not whole or each * number < _NOTABLE * whole:
        return
    remedy = "ask for fewer devices, or name another mesh"
    sizes = {graph.tensors[t].type.shape[:1] for t in batch} - {()}
    if len(sizes) == 1:
        ((size,),) = sizes
        fewer = max(n for n in range(1, number + 1) if size % n == 0)
        more = math.ceil(size / number) * number
        if fewer < number:
            remedy = f"use {fewer} devices, or {more} examples in place of {size}"
    warnings.warn(
        f"Every device of {plan.mesh} does {each / whole:.0%} of the heavy work of "
        f"{graph.name}, where an even share of {number} devices is {1 / number:.1%}: "
        f"no dim that would be split is a multiple of their number, or splitting takes "
        f"longer than repeating; {remedy}.",
        FallbackWarning,
        stacklevel=2,
    )
