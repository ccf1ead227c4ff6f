"""What the devices of a mesh can share, and what they repeat."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ..errors import FallbackWarning
from ..graph.op_graph import OpGraph
from ..graph.work import heavy_rows
from ..plans.plan import OperatorPlan, ShardingPlan
from ..sharding.mesh import MeshShape

# What is there, or is done, this many times more than it need be.
_NOTABLE = 1.5


def dividing_first(
    graph: OpGraph, shapes: Sequence[MeshShape]
) -> tuple[MeshShape, ...]:
    """The shapes in their order, but last those that leave tensors whole.

    They are those of which a device has notably more of all tensors than of others, as
    their axes divide fewer dims.
    """
    num_bytes: Counter[tuple[int, ...]] = Counter()
    for tensor in graph.tensors:
        num_bytes[tensor.type.shape] += tensor.type.bytes

    def share(shape: MeshShape) -> float:
        sizes = shape.axis_sizes
        return sum(n / most_parts(dims, sizes) for dims, n in num_bytes.items())

    shares = [share(shape) for shape in shapes]
    most = _NOTABLE * min(shares)
    pairs = sorted(zip(shares, shapes, strict=True), key=lambda pair: pair[0] > most)
    return tuple(shape for _, shape in pairs)


@lru_cache(maxsize=4096)
def most_parts(dims: tuple[int, ...], axis_sizes: tuple[int, ...]) -> int:
    """The most parts that axes of these sizes cut a tensor into, each along one dim."""
    if not axis_sizes:
        return 1
    size, rest = axis_sizes[0], axis_sizes[1:]
    best = most_parts(dims, rest)
    for dim, length in enumerate(dims):
        if length and length % size == 0:
            cut = (*dims[:dim], length // size, *dims[dim + 1 :])
            best = max(best, size * most_parts(cut, rest))
    return best


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
