"""Where leaves lie: parts on meshes, and arguments that stay where a step left them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..graph.op_graph import OpGraph
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin, parse_pin
from .distributed_array import AbstractDistributedArray
from .leaf_pieces import union_sharding

_MOST_AXES = 3  # planning on more takes too long to start it unasked


@dataclass(frozen=True)
class LeafPart:
    """Rows of a leaf along dim 0, `range(*rows)`, and where they lie.

    `rows` is None for the whole leaf, which need not have a dim.
    """

    sharding: NamedSharding
    rows: tuple[int, int] | None = None

    def shape_of(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of this part of a leaf."""
        if self.rows is None:
            return tuple(whole)
        first, last = self.rows
        return (last - first, *whole[1:])


LeafHome = tuple[LeafPart, ...]  # one part, or several that follow each other


def placed_type(kind: jax.ShapeDtypeStruct, home: LeafHome) -> Any:
    """The type of a leaf with where it lies: that of the array a step returns."""
    shapes = [part.shape_of(kind.shape) for part in home]
    shardings = [part.sharding for part in home]
    one = shardings[0] if len(home) == 1 else union_sharding(shapes, shardings)
    if one is not None:
        return kind.update(sharding=one)
    pieces = zip(shapes, shardings, strict=True)
    return AbstractDistributedArray(
        tuple(jax.ShapeDtypeStruct(s, kind.dtype, sharding=x) for s, x in pieces)
    )


def placement_pins(
    leaves: Sequence[Any], graph: OpGraph, mesh: MeshShape
) -> dict[int, Pin]:
    """A pin for each argument that is only read and lies on such a mesh, by tensor.

    So an evaluation step takes the parameters where the train step keeps them. State is
    not pinned: it is moved once, and then comes back as the plan has it.
    """
    pins = {}
    for leaf, graph_input in zip(leaves, graph.inputs, strict=False):
        sharding = getattr(leaf, "sharding", None)
        if graph_input.role == "state" or not isinstance(sharding, NamedSharding):
            continue
        kind = graph.tensors[graph_input.tensor].type
        if not kind.is_extended and _is_like(sharding, mesh):
            where = f"the placement of {graph_input.path}, {kind},"
            pins[graph_input.tensor] = parse_pin(sharding.spec, kind, mesh, where)
    return pins


def mesh_of_leaves(leaves: Sequence[Any], num_devices: int) -> MeshShape | None:
    """The mesh of all devices on which a leaf is split; None if none is.

    A step on the results of another is so planned on the mesh of that one.
    """
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            continue
        sizes = tuple(sharding.mesh.shape.values())
        if math.prod(sizes) == num_devices and len(sizes) <= _MOST_AXES:
            return MeshShape(tuple(map(str, sharding.mesh.axis_names)), sizes)
    return None


def _is_like(sharding: NamedSharding, mesh: MeshShape) -> bool:
    return tuple(sharding.mesh.shape.items()) == tuple(
        zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )
