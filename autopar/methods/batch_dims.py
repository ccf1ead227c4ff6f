"""Dims that are split with the batch, in every tensor of a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import FallbackWarning
from ..graph.op_graph import OpGraph
from ..sharding.mesh import MeshShape
from ..sharding.state_flow import StateFlow, state_flow
from .dim_names import Dim, DimTies
from .restrictions import NOT_SPLIT, States


@dataclass(frozen=True, eq=False)
class BatchDims:
    """The dims, by tensor, that are split with the batch over some mesh axes.

    `examples` are the tensors that have a dim of the batch: of a single example, whose
    dim of size 1 says nothing, any dim but that, and they are no state.
    """

    graph: OpGraph
    mesh: MeshShape
    ties: DimTies
    axes: Sequence[int]
    dims: dict[int, frozenset[int]]
    examples: frozenset[int]

    @classmethod
    def of(
        cls,
        name: str,
        graph: OpGraph,
        mesh: MeshShape,
        batch: Sequence[int],
        axes: Sequence[int],
    ) -> BatchDims:
        """The dims that are split as dim 0 of the tensors in `batch` over `axes`.

        Raises:
          ValueError: there is no batch, or one that the axes do not divide; `name` is
            the method that says so. Of unlike sizes, some may stay whole.
        """
        parts = prod(mesh.axis_sizes[axis] for axis in axes)
        if not batch and parts > 1:
            raise ValueError(
                f"{name} splits the batch, but {graph.name} has no argument that is "
                f"batch; name it with `batch_argnums`."
            )
        batch = _even(name, graph, mesh, batch, parts)
        ties = DimTies.of(graph, mesh)
        reached = ties.reach([(tensor, 0) for tensor in batch], parts)
        dims = dims_by_tensor(reached)
        examples = frozenset(dims)
        if all(graph.tensors[index].type.shape[0] == 1 for index in batch):
            state = {each.tensor for each in graph.inputs if each.role == "state"}
            shapes = {index: graph.tensors[index].type.shape for index in batch}
            others = [(i, d) for i, shape in shapes.items() for d in range(len(shape))]
            examples = frozenset(dims_by_tensor(ties.reach(others, 1))) - state
        return cls(graph, mesh, ties, axes, dims, examples)

    def states(self, tensor: int, axis: int) -> States:
        """What an axis may do to a tensor: split its batch dims, or nothing."""
        if axis in self.axes and tensor in self.dims:
            return self.dims[tensor]
        return NOT_SPLIT

    def flow(self) -> StateFlow:
        """What state is for."""
        return state_flow(self.graph, self.examples)


def flow_of_step(graph: OpGraph, batch: Sequence[int]) -> StateFlow:
    """What the state of a step is for, whose inputs in `batch` hold its examples."""
    one = MeshShape(("x",), (1,))
    return BatchDims.of("the step", graph, one, batch, ()).flow()


def _even(
    name: str, graph: OpGraph, mesh: MeshShape, batch: Sequence[int], parts: int
) -> list[int]:
    """The tensors in `batch` that are divided; a warning tells of others, if any are.

    Raises:
      ValueError: none are.
    """
    even = [i for i in batch if graph.tensors[i].type.shape[0] % parts == 0]
    if len(even) == len(batch):
        return even
    tensor = next(graph.tensors[i] for i in batch if i not in even)
    found = (
        f"{name} splits the batch into {parts} parts on the mesh {mesh}, but "
        f"{tensor.name} is {tensor.type}"
    )
    remedy = (
        f"use a batch that {parts} divides, or fewer devices, or name another batch "
        f"with batch_argnums."
    )
    if not even:
        raise ValueError(f"{found}; {remedy}")
    warnings.warn(
        f"{found} and stays whole, so that each device does all of its work; {remedy}",
        FallbackWarning,
        stacklevel=2,
    )
    return even


def dims_by_tensor(dims: Iterable[Dim]) -> dict[int, frozenset[int]]:
    """The same dims, those of a tensor together."""
    found: dict[int, set[int]] = {}
    for tensor, dim in dims:
        found.setdefault(tensor, set()).add(dim)
    return {tensor: frozenset(each) for tensor, each in found.items()}
