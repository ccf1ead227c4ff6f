"""Where leaves lie: parts on meshes, and arguments that stay where a step left them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..graph.op_graph import OpGraph
from ..sharding.mesh import MeshShape
from ..sharding.pins import PLACED, Pin, keys_of_paths, parse_pin
from .array_chunks import union_sharding
from .distributed_array import AbstractDistributedArray

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
    chunks = zip(shapes, shardings, strict=True)
    return AbstractDistributedArray(
        tuple(jax.ShapeDtypeStruct(s, kind.dtype, sharding=x) for s, x in chunks)
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
        if not kind.is_extended and is_like(sharding, mesh):
            where = f"the placement of {graph_input.path}, {kind},"
            pins[graph_input.tensor] = parse_pin(sharding.spec, kind, mesh, where)
    return pins


def placed_pins(
    pins: Mapping[str, Any],
    paths: Sequence[str],
    leaves: Sequence[Any],
    mesh: MeshShape | None,
) -> dict[str, Any]:
    """Pins with the spec of each array in place of `placed`, by its path.

    An expression may be found in leaves that lie on no mesh, which stay free.

    Args:
      pins: by path or expression, as `parallelize` has them.
      paths: of the arguments' leaves.
      leaves: arrays, or types that may have shardings.
      mesh: the mesh that the user named.

    Raises:
      ValueError: nothing that such a pin is for lies on a mesh, or not on `mesh`.
    """
    if PLACED not in pins.values():
        return dict(pins)
    key_of = keys_of_paths(pins, paths)
    found: dict[str, Any] = {}
    for key, spec in pins.items():
        if spec != PLACED:
            found[key] = spec
            continue
        own = {
            path: leaf.sharding
            for path, leaf in zip(paths, leaves, strict=False)
            if key_of.get(path) == key
            and isinstance(getattr(leaf, "sharding", None), NamedSharding)
        }
        if not own:
            raise ValueError(
                f"A pin {PLACED!r} must be for an array with a NamedSharding, but "
                f"{key!r} is found in none; place it with jax.device_put(x, "
                f"NamedSharding(mesh, spec)), or give the spec."
            )
        for path, sharding in own.items():
            if mesh is not None and not is_like(sharding, mesh):
                sizes = sharding.mesh.shape.items()
                other = ";".join(f"{name}:{size}" for name, size in sizes)
                raise ValueError(
                    f"A pin {PLACED!r} must be for an array on the mesh of the step, "
                    f"{mesh}, but {path} lies on {other}; name that mesh, or give "
                    f"the spec."
                )
            found[path] = sharding.spec
    return found


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


def is_like(sharding: NamedSharding, mesh: MeshShape) -> bool:
    """Whether an array lies on a mesh of this shape."""
    return tuple(sharding.mesh.shape.items()) == tuple(
        zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )
