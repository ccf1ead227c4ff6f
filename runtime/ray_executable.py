"""Run SPMD programs on the hosts of a Ray cluster, all hosts together.

State stays on the workers between steps; the driver holds handles to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_hosts import HostGroups
from autopar.lowering.exported_program import (
    ShardedType,
    export_program,
)
from autopar.lowering.programs import (
    SignatureChanged,
    SpmdProgram,
    is_traced,
)
from autopar.state.distributed_array import DistributedArray, signature

from .instructions import InstructionList, Run, Value
from .ray_steps import METRIC_BYTES, JobParts, LoadedJob
from .ray_workers import Workers
from .schedule import Task


class RayExecutable:
    """One SPMD program on all hosts of a cluster together, and its calls.

    Arguments:
      program: lowered for an abstract mesh.
      cluster: one of Ray, with the mesh's devices; its workers start with the first
        call.
      stays: positions of the results that stay on the workers whatever their size.
      submesh: the submesh that runs it, of those of `sizes` devices, which stages have
        besides; the others have nothing to do. All devices are one, if left out.

    Raises:
      NotImplementedError: see `export_program`.
    """

    def __init__(
        self,
        program: SpmdProgram,
        cluster: Cluster,
        stays: Collection[int],
        submesh: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.program = program
        assert cluster.ray_hosts is not None, "the cluster is one of Ray"
        sizes = sizes or [cluster.num_devices]
        groups = HostGroups.of(sizes, cluster.devices_per_host)
        code = export_program(program, cluster.ray_hosts.lowering_platform)
        code = code.at(groups.places[submesh][1])
        self._inputs = [(submesh, Value(f"in {i}")) for i in range(len(code.inputs))]
        self._outputs = [(submesh, Value(f"out {i}")) for i in range(len(code.outputs))]
        run = Run(
            Task(submesh, None, "apply"),
            0,
            tuple(value for _, value in self._inputs),
            tuple(value for _, value in self._outputs),
        )
        types = zip(self._outputs, code.outputs, strict=True)
        self._returned = {
            key
            for i, (key, type_) in enumerate(types)
            if comes_back(type_, is_state=i in stays)
        }
        parts = JobParts(
            code.name,
            tuple(
                InstructionList(i, (run,) if i == submesh else ())
                for i in range(len(sizes))
            ),
            groups,
            {i: i for i in range(len(sizes))},
            {0: (submesh, code, program.constants)},
            dict(zip(self._inputs, code.inputs, strict=True)),
            dict(zip(self._outputs, code.outputs, strict=True)),
            {self._inputs[i] for i in code.donated},
        )
        self._job = LoadedJob(cluster, parts)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Flat outputs of one step.

        Raises:
          SignatureChanged: other shapes or dtypes than those planned for.
          HostLostError, WorkerError, RuntimeError: see `Workers.call`.
        """
        refuse_traced(leaves)
        types = zip(leaves, self.program.argument_types, strict=True)
        if any(signature(leaf) != (t.shape, t.dtype) for leaf, t in types):
            raise SignatureChanged
        kept = [key for key in self._outputs if key not in self._returned]
        given = dict(zip(self._inputs, leaves, strict=True))
        remote, results, _ = self._job.get(leaves)(given, kept, self._returned)
        return [
            results[key] if key in results else DistributedArray((remote[key],))
            for key in self._outputs
        ]

    @property
    def workers(self) -> Workers:
        """The workers that run it."""
        return self._job.get().workers

    def close(self) -> None:
        """End the workers, with all arrays that they keep."""
        self._job.close()


def comes_back(type_: ShardedType, is_state: bool) -> bool:
    """Whether a result goes to the driver: metrics do, and keys, whatever they are.

    Raises:
      NotImplementedError: keys in numbers that are no metric.
    """
    if type_.nbytes <= METRIC_BYTES:
        return not is_state or bool(type_.key_impl)
    if type_.key_impl:
        raise NotImplementedError(
            f"Random keys pass through the driver, in {METRIC_BYTES} bytes at most, "
            f"but {type_} is more; split a single key inside the step."
        )
    return False


def refuse_traced(leaves: Sequence[Any]) -> None:
    """Does nothing if the leaves are values.

    Raises:
      NotImplementedError: the call stands inside a JAX transformation.
    """
    if is_traced(leaves):
        raise NotImplementedError(
            "A step that runs on other hosts cannot be part of a JAX transformation; "
            "transform the function itself, and parallelize what comes out."
        )
