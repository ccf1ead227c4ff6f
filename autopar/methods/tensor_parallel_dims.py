"""The dims that tensor parallelism splits, found from the operators that share them.

Dims that are split together form a class. A class is split everywhere or nowhere, and
no two classes of one tensor both are: so each class is a decision of a small choice
graph, which splits as much of the heavy work as it can, and of all ways to do so takes
the one whose partial sums are smallest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from autopar.solver.solve import solve

from ..costs.compute import total_flops
from ..graph.op_graph import Operator
from ..graph.work import is_heavy_operator
from ..rules.base import Factor, factors_of
from ..sharding.spec import SUM
from .dim_names import Dim, DimTies

# What a byte of partial sums weighs beside a flop that is repeated, each as a part of
# all there are: so little that it decides between ways to split the same work.
_SUMS_WEIGHT = 1e-3


@dataclass(frozen=True)
class _DimClass:
    """Dims that are split together; the heavy flops and partial sums if they are."""

    dims: frozenset[Dim]
    flops: float
    summed_bytes: float


def tensor_parallel_dims(
    ties: DimTies, num_parts: int, parameters: Collection[int], batch: Sequence[int]
) -> set[Dim]:
    """The dims to split into `num_parts`, in all tensors.

    Only dims of `parameters` come into question, and none that an argument in `batch`
    has: what enters the step and what it is compared with stays whole in a group.
    """
    classes = _candidates(ties, num_parts, parameters, batch)
    if not classes:
        return set()
    flops = sum(each.flops for each in classes)
    summed = sum(each.summed_bytes for each in classes) or 1.0
    nodes = tuple(
        Node(
            f"class {index}",
            np.array([each.flops / flops, _SUMS_WEIGHT * each.summed_bytes / summed]),
            np.zeros(2),
        )
        for index, each in enumerate(classes)
    )
    both, either = np.array([[0.0, 0.0], [0.0, np.inf]]), np.arange(2)
    edges = tuple(Edge(i, j, either, either, both) for i, j in _conflicts(classes))
    choices = solve(ChoiceGraph(nodes, edges), gap=0.0).choices
    chosen = [c for c, choice in zip(classes, choices, strict=True) if choice]
    return {dim for each in chosen for dim in each.dims}


def _candidates(
    ties: DimTies, num_parts: int, parameters: Collection[int], batch: Collection[int]
) -> list[_DimClass]:
    graph = ties.graph
    classes = ties.classes(num_parts)
    found = {dim: index for index, dims in enumerate(classes) for dim in dims}
    flops, summed = np.zeros(len(classes)), np.zeros(len(classes))
    for op in graph.operators():
        weight = graph.blocks[op.block].weight
        for factor in factors_of(op) if is_heavy_operator(op) else ():
            dim = _a_dim(op, factor)
            if dim in found and factor.splits and factor.size % num_parts == 0:
                flops[found[dim]] += total_flops(op) * weight
                if SUM in factor.results:
                    size = sum(kind.bytes for kind in op.result_types)
                    summed[found[dim]] += size * weight
    return [
        _DimClass(dims, flops[index], summed[index])
        for index, dims in enumerate(classes)
        if flops[index]
        and any(tensor in parameters for tensor, _ in dims)
        and not any(tensor in batch for tensor, _ in dims)
        and len({tensor for tensor, _ in dims}) == len(dims)
    ]


def _a_dim(op: Operator, factor: Factor) -> Dim | None:
    """Any dim that a factor splits."""
    pairs = [*zip(op.operands, factor.operands, strict=True)]
    pairs += zip(op.results, factor.results, strict=True)
    dims = ((t, dim) for t, dim in pairs if isinstance(t, int) and dim >= 0)
    return next(dims, None)


def _conflicts(classes: Sequence[_DimClass]) -> list[tuple[int, int]]:
    """Pairs of classes that some tensor has both of."""
    by_tensor: dict[int, list[int]] = {}
    for index, each in enumerate(classes):
        for tensor, _ in each.dims:
            by_tensor.setdefault(tensor, []).append(index)
    pairs = (combinations(held, 2) for held in by_tensor.values())
    return sorted({pair for each in pairs for pair in each})
