"""Where a user wants, or has, the leaves that a stage program takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from ..graph.op_graph import OpGraph
from ..sharding.mesh import MeshShape
from ..sharding.pins import (
    PLACED,
    Pin,
    check_matched,
    is_matched,
    is_path,
    resolve_pins,
    warn_idle_pins,
)
from ..state.placements import placement_pins


@dataclass(frozen=True)
class StagePins:
    """Pins of the step's arguments, by path or expression, and leaves that stay.

    `read_only` are leaves that no step updates, by path: they are taken from where they
    lie, if that is on such a mesh.
    """

    pins: Mapping[str, PartitionSpec]
    of_paths: frozenset[str]  # those pins that are paths themselves
    read_only: Mapping[str, Any]

    @classmethod
    def checked(
        cls,
        pins: Mapping[str, PartitionSpec],
        paths: Sequence[str],
        read_only: Mapping[str, Any],
    ) -> StagePins:
        """Pins of which each is found in `paths`.

        Raises:
          ValueError: one is not.
          NotImplementedError: one is to stay where its array lies.
        """
        check_matched(pins, paths)
        warn_idle_pins(pins, paths)
        for key, spec in pins.items():
            if spec == PLACED:
                raise NotImplementedError(
                    f"A pin {PLACED!r} is not there for pipelines yet "
                    f"(docs/roadmap.md), whose stages lie on meshes of their own, but "
                    f"{key!r} is one; give its spec."
                )
        return cls(pins, frozenset(k for k in pins if is_path(k, paths)), read_only)

    def of_piece(self, graph: OpGraph, mesh: MeshShape) -> dict[int, Pin]:
        """The pins of a stage program on its mesh, by tensor."""
        paths = [i.path for i in graph.inputs]
        mine = {
            key: spec
            for key, spec in self.pins.items()
            if is_path(key, paths)
            or (key not in self.of_paths and is_matched(key, paths))
        }
        leaves = [self.read_only.get(path) for path in paths]
        return {
            **placement_pins(leaves, graph, mesh),
            **resolve_pins(mine, graph, mesh),
        }
