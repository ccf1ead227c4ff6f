"""Run programs on the hosts of a Ray cluster: one on all together, or a pipeline.

State stays on the workers between steps; the driver holds handles to it. Of a pipeline
each stage runs on its own hosts, a lane a submesh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autopar.clusters.cluster import Cluster
from autopar.lowering.exported_program import ShardedType
from autopar.lowering.programs import (
    PipelineProgram,
    SignatureChanged,
    Slot,
    SpmdProgram,
    StageProgram,
    is_traced,
)
from autopar.state.distributed_array import DistributedArray, signature

from .emit import emit, results_of, state_keys
from .instructions import Held, made_in
from .ray_arrays import is_on_workers
from .ray_programs import run_elsewhere
from .ray_steps import METRIC_BYTES, JobParts, OnHosts
from .schedule import Schedule, Task
from .simulate import simulate
from .timeline import Timeline


class RayExecutable(OnHosts):
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
        sizes = sizes or [cluster.num_devices]
        inputs = tuple(f"in {i}" for i in range(len(program.argument_types)))
        outputs = tuple(f"out {i}" for i in range(len(program.output_shardings)))
        stage = StageProgram(submesh, "apply", inputs, outputs, run_elsewhere)
        slots = {
            **{name: Slot(name, "state", submesh) for name in inputs},
            **{name: Slot(name, "result", submesh) for name in outputs},
        }
        flow = PipelineProgram(len(sizes), 1, slots, (stage,), {}, {})
        tasks = {submesh: (Task(submesh, None, "apply"),)}
        rows = tuple(tasks.get(i, ()) for i in range(len(sizes)))
        lists = emit(flow, Schedule("one program", len(sizes), 1, rows))
        own = {i: i for i in range(len(sizes))}
        parts = JobParts.of(flow, [program], lists, own, cluster, sizes)
        self._inputs = [*parts.inputs]
        self._outputs = [key for keys in parts.results.values() for key in keys]
        self._returned = {
            key
            for i, key in enumerate(self._outputs)
            if comes_back(parts.ends[key], is_state=i in stays)
        }
        super().__init__(cluster, parts)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Flat outputs of one step.

        Raises:
          SignatureChanged: other shapes or dtypes than those planned for.
        """
        refuse_traced(leaves)
        types = zip(leaves, self.program.argument_types, strict=True)
        if any(signature(leaf) != (t.shape, t.dtype) for leaf, t in types):
            raise SignatureChanged
        kept = [key for key in self._outputs if key not in self._returned]
        given = dict(zip(self._inputs, leaves, strict=True))
        remote, results, _ = self.job(leaves)(given, kept, self._returned)
        return [
            results[key] if key in results else DistributedArray((remote[key],))
            for key in self._outputs
        ]


class RayPipelineExecutable(OnHosts):
    """A pipeline program on the hosts of a cluster; as `PipelineExecutable`.

    Each submesh of the schedule is a part of one host, or several whole ones, in their
    order. Submeshes of one host are run by one process, a thread each.

    Arguments:
      program: the stages; what its stage programs run is not called.
      codes: the stage programs, lowered for abstract meshes, in the same order.
      schedule: in which order each stage runs its tasks.
      cluster: one of Ray; its workers start with the first step.
      sizes: number of devices of each submesh.

    Raises:
      ValueError: the schedule does not fit the program, or deadlocks.
      NotImplementedError: see `HostGroups.of` and `export_program`.
    """

    def __init__(
        self,
        program: PipelineProgram,
        codes: Sequence[SpmdProgram],
        schedule: Schedule,
        cluster: Cluster,
        sizes: Sequence[int],
    ) -> None:
        self.program = program
        self.instructions = emit(program, schedule)
        simulate(self.instructions)  # refuses a deadlock before any host waits
        submeshes = schedule.submesh_by_stage
        parts = JobParts.of(
            program, codes, self.instructions, submeshes, cluster, sizes
        )
        self._inputs, self._results = [*parts.inputs], parts.results
        self._state, made = state_keys(program), made_in(self.instructions)
        self._updated = {name for name, key in self._state.items() if key in made}
        results = {key for keys in self._results.values() for key in keys}
        self._returned = {
            key
            for key in (*results, *(self._state[name] for name in self._updated))
            if comes_back(parts.ends[key], key not in results)
        }
        self._large = results - self._returned
        super().__init__(cluster, parts)

    def __call__(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step: the new state and the results, by slot name.

        State comes back as handles to arrays of the workers, also what was given as
        ordinary arrays.
        """
        new_state, results, _ = self._step(state, batch, is_recorded=False)
        return new_state, results

    def record(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
        """A step that waits for every run, and when each task ran, on one clock."""
        return self._step(state, batch, is_recorded=True)

    def _step(
        self,
        state: Mapping[str, Any],
        batch: Mapping[str, Sequence[Any]],
        is_recorded: bool,
    ) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
        refuse_traced([*state.values(), *(x for each in batch.values() for x in each)])
        given = {
            key: state[key[1].slot]
            if key[1].microbatch is None
            else batch[key[1].slot][key[1].microbatch]
            for key in self._inputs
        }
        fresh = {
            key
            for name, key in self._state.items()
            if key in given
            and (name in self._updated or not is_on_workers(given[key]))
            and key not in self._returned
        }
        kept = [*fresh, *self._large]
        remote, returned, timeline = self.job(given.values())(
            given, kept, self._returned, is_recorded
        )
        ends: dict[Held, Any] = {
            **{key: DistributedArray((array,)) for key, array in remote.items()},
            **returned,
        }
        new_state = {n: ends.get(key, state[n]) for n, key in self._state.items()}
        return new_state, results_of(self._results, ends), timeline


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
