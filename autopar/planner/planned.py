"""A planned step: its trace, graph and plan, and the programs of that plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import jax
from jax.sharding import AbstractMesh, Mesh

from ..clusters.cluster import Cluster
from ..costs.resharding import Resharder
from ..frontend.tracing import weak_outputs
from ..graph.op_graph import OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..lowering.compiled_program import compile_program
from ..lowering.device_mesh import absent_mesh, device_mesh
from ..lowering.memory_use import MemoryUse
from ..lowering.programs import SpmdProgram, build_program
from ..options import Options
from ..plans.plan import Prediction, ShardingPlan
from ..targets.target import Target, is_compiled_elsewhere
from .whole_step import donated_by_name


@dataclass(frozen=True, eq=False)
class Planned:
    """One signature of a function: its trace, graph, plan and argument types."""

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    plan: ShardingPlan
    cluster: Cluster
    argument_types: tuple[jax.ShapeDtypeStruct, ...]
    options: Options

    @property
    def name(self) -> str:
        return self.traced.name

    @property
    def num_devices(self) -> int:
        return self.plan.mesh.size

    @property
    def predicted(self) -> Prediction:
        return self.plan.predicted

    def saying(self, predicted: Prediction) -> Planned:
        """The same with another prediction, and with the programs that were made."""
        if predicted is self.plan.predicted:
            return self
        saying = replace(self, plan=replace(self.plan, predicted=predicted))
        made = {"program", "program_here"} & vars(self).keys()
        vars(saying).update({name: vars(self)[name] for name in made})
        return saying

    def summary(self) -> str:
        """One line: the mesh, and what was taken as state and batch."""
        roles = self.roles.summary(self.traced.input_paths)
        return f"{self.traced.name} on {self.plan.mesh}: {roles}"

    def donated(self) -> tuple[int, ...]:
        """Positions of the leaves whose buffers the step may reuse."""
        if self.options.donate_argnums == "auto":
            roles = enumerate(self.roles.roles)
            return tuple(i for i, role in roles if role == "state")
        return tuple(donated_by_name(self.traced, self.options))

    @cached_property
    def program_here(self) -> SpmdProgram:
        """The program on devices of this process, or of the hosts of a Ray cluster.

        Raises:
          ValueError: there are too few devices.
        """
        given = self.options.mesh
        return self._built(device_mesh(self.plan.mesh, given, self.cluster))

    @cached_property
    def program(self) -> SpmdProgram:
        """The program to be compiled: here, or for a cluster that is not here.

        It is for devices here where the compiler of others is not installed. One of
        several kinds is run here, if it can be.

        Raises:
          TargetError: the mesh does not fit the hosts, or there are several kinds.
        """
        cluster, shape = self.cluster, self.plan.mesh
        if not is_compiled_elsewhere(cluster, self.options.mesh):
            return self.program_here
        if cluster.parts and shape.size <= jax.device_count():
            return self.program_here
        target = Target.of(cluster, shape.size)
        mesh = absent_mesh(shape, target.name, target.platform)
        return replace(self._built(mesh), target=target)

    def _built(self, mesh: Mesh | AbstractMesh) -> SpmdProgram:
        return build_program(
            self.graph,
            self.plan,
            Resharder(self.plan.mesh, self.cluster),
            mesh,
            self.argument_types,
            self.traced.jaxpr.consts,
            self.donated(),
            weak_outputs(self.traced),
        )

    def compiled_bytes(self, limit_seconds: float = inf) -> int:
        """What the compiled program holds on a device.

        Raises:
          TimeoutError: it took longer than `limit_seconds`, which only a target has.
        """
        compiled = compile_program(self.program, limit_seconds)
        return MemoryUse.of(compiled, self.program.host_bytes).device_bytes
