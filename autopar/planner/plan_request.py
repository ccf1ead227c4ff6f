"""What a plan is asked for: one value that goes down through the loops of planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ..clusters.cluster import Cluster
from ..costs.user_shard_map import user_mesh
from ..graph.build_graph import PINS
from ..graph.op_graph import OpGraph
from ..methods.methods import Auto, ShardParallel
from ..methods.named_methods import Megatron, ThreeD
from ..options import Options
from ..sharding.mesh import MeshShape, parse_mesh
from ..state.placements import mesh_of_leaves, placed_pins
from .mesh_shapes import default_mesh


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What is to be planned, and how.

    Attributes:
      graph: the step.
      leaves: those of the step's arguments.
      batch: the graph's inputs that are split with the batch.
      cluster: the devices.
      options: what was asked for.
    """

    graph: OpGraph
    leaves: Sequence[Any]
    batch: Sequence[int]
    cluster: Cluster
    options: Options

    def asking(self, **options: Any) -> Self:
        """The same with other options."""
        return replace(self, options=replace(self.options, **options))

    def with_placed_pins(self) -> Self:
        """The same, with specs for pins that keep arguments where they lie.

        Raises:
          ValueError: such an argument lies on no mesh, or on another.
        """
        mesh, pins = None, self.options.pins
        if self.options.mesh is not None:
            mesh = parse_mesh(self.options.mesh, self.cluster.num_devices)
        paths = [each.path for each in self.graph.inputs]
        return self.asking(pins=placed_pins(pins, paths, self.leaves, mesh))

    def mesh(self) -> MeshShape | None:
        """The mesh that the user, the step or the arguments name; None: search one."""
        options, cluster = self.options, self.cluster
        if options.mesh is not None:
            return parse_mesh(options.mesh, cluster.num_devices)
        named = user_mesh(self.graph) or mesh_of_leaves(
            self.leaves, cluster.num_devices
        )
        if named is not None:
            return named
        if isinstance(options.method, Megatron | ThreeD):
            return options.method.mesh(cluster.num_devices)
        names_axes = any(e for spec in options.pins.values() for e in spec or ())
        has_pins = any(op.kind in PINS for op in self.graph.operators())
        is_free = isinstance(options.method, Auto | ShardParallel)
        is_free &= getattr(options.method, "objective", "time") == "time"
        if names_axes or has_pins or options.rules or not is_free:
            return default_mesh(cluster)
        return None
