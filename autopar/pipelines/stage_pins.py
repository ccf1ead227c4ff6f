"""Where a user wants, or has, the leaves that a stage program takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..graph.op_graph import OpGraph
from ..sharding.mesh import MeshShape
from ..sharding.pins import (
    FREE,
    PLACED,
    Pin,
    check_matched,
    is_matched,
    is_path,
    keys_of_paths,
    resolve_pins,
    warn_idle_pins,
)
from ..state.placements import is_like, placement_pins


@dataclass(frozen=True)
class StagePins:
    """Pins of the step's arguments, by path or expression, and leaves that stay.

    `read_only` are leaves that no step updates, by path: they are taken from where they
    lie, if that is on such a mesh. `placed` are those that a pin keeps where they lie,
    whose specs are among the pins.
    """

    pins: Mapping[str, PartitionSpec]
    of_paths: frozenset[str]  # those pins that are paths themselves
    read_only: Mapping[str, Any]
    placed: Mapping[str, NamedSharding] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        pins: Mapping[str, PartitionSpec],
        paths: Sequence[str],
        read_only: Mapping[str, Any],
        shardings: Mapping[str, NamedSharding],
    ) -> StagePins:
        """Pins of which each is found in `paths`.

        `shardings` are those of the arrays, by path, where they have one.

        Raises:
          ValueError: a pin is found nowhere, or is to stay and lies on no mesh.
        """
        check_matched(pins, paths)
        warn_idle_pins(pins, paths)
        found = {key: spec for key, spec in pins.items() if spec != PLACED}
        placed: dict[str, NamedSharding] = {}
        key_of = keys_of_paths(pins, paths)
        for key in pins.keys() - found.keys():
            own = {path for path in paths if key_of.get(path) == key}
            if own.isdisjoint(shardings):
                raise ValueError(
                    f"A pin {PLACED!r} must be for an array with a NamedSharding, but "
                    f"{key!r} is found in none; place it with jax.device_put(x, "
                    f"NamedSharding(mesh, spec)), or give the spec."
                )
            placed.update((p, shardings[p]) for p in own.intersection(shardings))
        found.update((path, each.spec) for path, each in placed.items())
        of_paths = frozenset(key for key in found if is_path(key, paths))
        return cls(found, of_paths, read_only, placed)

    def of_piece(self, graph: OpGraph, mesh: MeshShape) -> dict[int, Pin]:
        """The pins of a stage program on its mesh, by tensor.

        What a stage reads of another stage's leaf is not pinned where the mesh has not
        all axes that the pin names.
        """
        paths = [i.path for i in graph.inputs]
        axes = {*mesh.axis_names}
        mine = {k: v for k, v in self._found_in(paths).items() if _axes_of(v) <= axes}
        leaves = [self.read_only.get(path) for path in paths]
        return {
            **placement_pins(leaves, graph, mesh),
            **resolve_pins(mine, graph, mesh),
        }

    def check_stages(
        self,
        stages_of: Mapping[str, Sequence[int]],
        shapes: Sequence[MeshShape],
        devices: Sequence[range],
    ) -> None:
        """Does nothing if every pin can be kept on a stage that has its leaf.

        Arguments:
          stages_of: the stages of each leaf, by path: one for state, which lives there,
            and for examples all that read them.
          shapes: the mesh of each stage.
          devices: the devices of each stage, counted from the first of the cluster; of
            no stage, if they are not known.

        Raises:
          ValueError: a pin names axes of other stages, or a leaf lies there.
        """
        for path, sharding in self.placed.items():
            for stage in stages_of.get(path, ())[:1]:
                _check_placed(path, sharding, stage, shapes, devices)
        found = self._found_in([*stages_of])
        for path, key in keys_of_paths(found, [*stages_of]).items():
            axes, stages = _axes_of(self.pins[key]), stages_of[path]
            if not any(axes <= {*shapes[stage].axis_names} for stage in stages):
                raise ValueError(
                    f"A leaf lives on one stage, so its pin may name axes of that "
                    f"stage's mesh alone, but the pin {key!r} of {path} is "
                    f"{self.pins[key]}, which names {_where_axes_are(axes, shapes)}, "
                    f"and {path} is on stage {stages[0]}, whose mesh is "
                    f"{shapes[stages[0]]}; name axes of that mesh, or move the leaf to "
                    f"another stage with PipelineParallel(stage_products=...)."
                )

    def _found_in(self, paths: Sequence[str]) -> dict[str, PartitionSpec]:
        """The pins of some of the leaves."""
        return {
            key: spec
            for key, spec in self.pins.items()
            if is_path(key, paths)
            or (key not in self.of_paths and is_matched(key, paths))
        }


def _check_placed(
    path: str,
    sharding: NamedSharding,
    stage: int,
    shapes: Sequence[MeshShape],
    devices: Sequence[range],
) -> None:
    """Does nothing if an array lies on the mesh of its stage.

    Raises:
      ValueError: it lies on another mesh, or on devices of other stages.
    """
    held = _positions(sharding)
    stages = [i for i, each in enumerate(devices) if not held.isdisjoint(each)]
    is_here = not held or not devices or held <= {*devices[stage]}
    if is_like(sharding, shapes[stage]) and is_here:
        return
    sizes = ";".join(f"{name}:{size}" for name, size in sharding.mesh.shape.items())
    where = f" on devices of stages {', '.join(map(str, stages))}" if stages else ""
    raise ValueError(
        f"A leaf lives on one stage, so a pin {PLACED!r} must be for an array on the "
        f"mesh of that stage, but {path} is on stage {stage}, whose mesh is "
        f"{shapes[stage]}, and its array lies on {sizes}{where}; leave the pin out, "
        f"which moves it there, or move the leaf to another stage with "
        f"PipelineParallel(stage_products=...)."
    )


def _positions(sharding: NamedSharding) -> frozenset[int]:
    """Devices that hold an array, counted from the first; none if they are remote."""
    if not isinstance(sharding.mesh, Mesh):
        return frozenset()
    position = {device: i for i, device in enumerate(jax.devices())}
    return frozenset(position[each] for each in sharding.device_set if each in position)


def _axes_of(spec: object) -> frozenset[str]:
    """The mesh axes that a pin names; of what is no spec, none."""
    if not isinstance(spec, PartitionSpec):
        return frozenset()
    entries = [each for each in spec if each is not None and each is not FREE]
    return frozenset(
        name
        for each in entries
        for name in ((each,) if isinstance(each, str) else each)
    )


def _where_axes_are(axes: frozenset[str], shapes: Sequence[MeshShape]) -> str:
    """`'a' of stage 0 and 'b' of stage 1`."""
    words: list[str] = []
    for axis in sorted(axes):
        having = [str(i) for i, shape in enumerate(shapes) if axis in shape.axis_names]
        where = f"stage {' and '.join(having)}" if having else "none"
        words.append(f"{axis!r} of {where}")
    return " and ".join(words)
