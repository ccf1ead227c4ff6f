"""Megatron's tensor parallelism as demands on tensors, with sequence parallelism."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from autopar.solver.solve import solve

from ..costs.compute import total_flops
from ..graph.op_graph import Operator, OpGraph
from ..graph.work import is_heavy_operator
from ..rules.base import Factor, factors_of
from ..sharding.mesh import MeshShape
from ..sharding.spec import SUM
from .batch_dims import BatchDims, dims_by_tensor
from .dim_names import Dim, DimTies
from .restrictions import NOT_SPLIT, PENDING, Demand, Restriction, States


def megatron_restriction(
    name: str,
    num_parts: int,
    graph: OpGraph,
    mesh: MeshShape,
    batch: Sequence[int],
    *,
    sequence: bool,
) -> Restriction:
    """What Megatron leaves to the solver.

    Args:
      name: what errors call the method.
      num_parts: devices in a group.
      graph: the step.
      mesh: its last axes hold a group.
      batch: the tensors whose dim 0 is the batch.
      sequence: whether what lies between layers is split by dim 1 of the batch.

    Raises:
      ValueError: the mesh or the batch does not fit.
      NotImplementedError: dim 1 of the batch is not found between the layers.
    """
    dims = megatron_dims(name, num_parts, graph, mesh, batch, sequence=sequence)
    return dims.restriction(name, graph, mesh)


@dataclass(frozen=True)
class MegatronDims:
    """Dims that are split, by tensor: with the batch, in groups, and between layers.

    `first` is the first of the mesh axes that hold a group.
    """

    first: int
    batch: Mapping[int, frozenset[int]]
    split: Mapping[int, frozenset[int]]
    between: Mapping[int, frozenset[int]]

    def restriction(self, name: str, graph: OpGraph, mesh: MeshShape) -> Restriction:
        """The demands on all tensors of a graph whose dims these are."""
        everywhere: dict[int, Demand] = {}
        made: dict[int, Demand] = {}
        num_inside = mesh.num_axes - self.first
        for tensor in graph.tensors:
            states: States = self.batch.get(tensor.index, NOT_SPLIT)
            data = (states,) * self.first
            inside: States = self.split.get(tensor.index, NOT_SPLIT)
            if tensor.index not in self.split and tensor.index in self.between:
                dims = self.between[tensor.index]
                inside = NOT_SPLIT | dims
                made[tensor.index] = data + (PENDING | dims,) * num_inside
            everywhere[tensor.index] = data + (inside,) * num_inside
        return Restriction(name, everywhere, made, {})


def megatron_dims(
    name: str,
    num_parts: int,
    graph: OpGraph,
    mesh: MeshShape,
    batch: Sequence[int],
    *,
    sequence: bool,
) -> MegatronDims:
    """The dims that Megatron splits; arguments and errors as above."""
    first = _first_tensor_axis(name, num_parts, mesh)
    work = BatchDims.of(name, graph, mesh, batch, range(first))
    parameters = work.flow().parameters
    split = dims_by_tensor(
        tensor_parallel_dims(work.ties, num_parts, parameters, batch)
    )
    between: dict[int, frozenset[int]] = {}
    if sequence:
        between = _sequence_dims(name, num_parts, work, batch)
        _check_sequence(name, graph, between, split)
    return MegatronDims(first, work.dims, split, between)


def _first_tensor_axis(name: str, num_parts: int, mesh: MeshShape) -> int:
    for first in range(mesh.num_axes, -1, -1):
        if prod(mesh.axis_sizes[first:]) == num_parts:
            return first
    raise ValueError(
        f"The last mesh axes must hold the devices of a group, but {name} has "
        f"the mesh {mesh}; use a last axis of {num_parts}, or leave out `mesh`."
    )


def _sequence_dims(
    name: str, num_parts: int, work: BatchDims, batch: Sequence[int]
) -> dict[int, frozenset[int]]:
    """The dim that is dim 1 of the batch, in every tensor that has it once.

    State is split by it only if it is of examples: a table of positions is not.
    """
    shapes = {tensor: work.graph.tensors[tensor].type.shape for tensor in batch}
    origins = [
        (tensor, 1)
        for tensor, shape in shapes.items()
        if len(shape) > 1 and shape[1] % num_parts == 0
    ]
    if not origins:
        found = sorted(set(shapes.values()))
        raise ValueError(
            f"{name} splits dim 1 of the batch by {num_parts}, but "
            f"the batch has the shapes {found}; use a length that {num_parts} "
            f"divides, or leave out sequence=True."
        )
    state = {each.tensor for each in work.graph.inputs if each.role == "state"}
    reached = dims_by_tensor(work.ties.reach(origins, num_parts))
    return {
        tensor: dims
        for tensor, dims in reached.items()
        if len(dims) == 1 and (tensor not in state or tensor in work.dims)
    }


def _check_sequence(
    name: str,
    graph: OpGraph,
    sequence: Collection[int],
    split: Collection[int],
) -> None:
    """Refuse a sequence that no split layer reads or makes."""
    for op in graph.operators():
        tensors = {o for o in (*op.operands, *op.results) if isinstance(o, int)}
        if any(t in split for t in tensors):
            if any(t in sequence and t not in split for t in tensors):
                return
    raise NotImplementedError(
        f"{name} splits what lies between its layers by dim 1 of the batch, "
        f"but no operator rule takes that dim as far as a layer of {graph.name}; leave "
        f"out sequence=True."
    )


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

    Dims that are split together form a class. A class is split everywhere or nowhere,
    and no two classes of one tensor both are: so each class is a decision of a small
    choice graph, which splits as much of the heavy work as it can, and of all ways to
    do so takes the one whose partial sums are smallest.

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
