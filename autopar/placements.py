"""Arguments that lie on the mesh already, as an earlier step left them, stay there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from .graph import OpGraph
from .mesh import MeshShape
from .pins import Pin, parse_pin


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


def _is_like(sharding: NamedSharding, mesh: MeshShape) -> bool:
    return tuple(sharding.mesh.shape.items()) == tuple(
        zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )
