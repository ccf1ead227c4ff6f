"""What the inside of stages is, where it has a name: Megatron's tensor parallelism.

Which dims are split with the batch, over a group of devices and, between layers, along
the sequence is found once, from a whole microbatch, forward and backward: stages agree
also where a border lies inside a layer. In the program of a stage these dims are found
again by following them from what comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from ..graph.dim_names import Dim, DimTies
from ..graph.op_graph import OpGraph
from ..methods.batch_dims import dims_by_tensor
from ..methods.megatron_restriction import MegatronDims, megatron_dims
from ..methods.named_methods import Megatron
from ..methods.restrictions import Demand, Restriction, States
from ..sharding.mesh import MeshShape

_DimsBySlot = Mapping[str, frozenset[int]]


@dataclass(frozen=True, eq=False)
class StageInside:
    """The dims of every slot that stages split, by what they split them over.

    `first` is the first of the mesh axes that hold a group.
    """

    name: str
    num_parts: int
    first: int
    batch: _DimsBySlot
    split: _DimsBySlot
    between: _DimsBySlot

    @classmethod
    def of(
        cls,
        method: Megatron,
        graph: OpGraph,
        held: Collection[str],
        batch: Collection[str],
        mesh: MeshShape,
    ) -> StageInside:
        """The dims in a microbatch; `held` are paths of state, `batch` of examples.

        Raises:
          ValueError: the mesh or the microbatch does not fit the method.
          NotImplementedError: as for `Megatron`.
        """
        inputs = (
            replace(i, role="state" if i.path in held else "batch")
            for i in graph.inputs
        )
        graph = replace(graph, inputs=tuple(inputs))
        name = f"Megatron(tensor={method.tensor})"
        dims = megatron_dims(
            *(name, method.tensor, graph, mesh),
            [i.tensor for i in graph.inputs if i.path in batch],
            sequence=method.sequence,
        )

        def by_slot(found: Mapping[int, frozenset[int]]) -> _DimsBySlot:
            made = {t.name: found[t.index] for t in graph.tensors if t.index in found}
            for path, operand in zip(graph.output_paths, graph.outputs, strict=True):
                if isinstance(operand, int) and operand in found:
                    made[path] = found[operand]
            return made

        return cls(
            *(name, method.tensor, dims.first),
            *(by_slot(dims.batch), by_slot(dims.split), by_slot(dims.between)),
        )

    def restriction(self, part: OpGraph, mesh: MeshShape) -> Restriction:
        """What the program of a stage leaves to the solver; it takes slots."""
        ties = DimTies.of(part, mesh)

        def reached(slots: _DimsBySlot, parts: int) -> dict[int, frozenset[int]]:
            origins: list[Dim] = [
                (i.tensor, dim) for i in part.inputs for dim in slots.get(i.path, ())
            ]
            return dims_by_tensor(ties.reach(origins, parts))

        batch = reached(self.batch, prod(mesh.axis_sizes[: self.first]))
        split = reached(self.split, self.num_parts)
        whole = {i.tensor for i in part.inputs if i.path not in self.between}
        between = {
            tensor: dims
            for tensor, dims in reached(self.between, self.num_parts).items()
            if len(dims) == 1 and tensor not in whole
        }
        dims = MegatronDims(self.first, batch, split, between)
        found = dims.restriction(self.name, part, mesh)
        slots = [(i.path, i.tensor) for i in part.inputs]
        results = zip(part.output_paths, part.outputs, strict=True)
        return replace(
            found,
            homes=self._borders(slots, dims, mesh),
            returned=self._borders(
                [(path, t) for path, t in results if isinstance(t, int)], dims, mesh
            ),
        )

    def _borders(
        self, slots: list[tuple[str, int]], dims: MegatronDims, mesh: MeshShape
    ) -> dict[int, Demand]:
        """Between stages, too, what lies between layers is split by the sequence."""
        found: dict[int, Demand] = {}
        for path, tensor in slots:
            if path in self.between and tensor not in dims.split:
                data: States = dims.batch.get(tensor)
                inside = self.between[path]
                num_inside = mesh.num_axes - self.first
                found[tensor] = (data,) * self.first + (inside,) * num_inside
        return found
