"""Run a pipeline on a Ray cluster: each stage on its own hosts, one lane a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_hosts import HostGroups
from autopar.lowering.exported_program import (
    ExportedProgram,
    ShardedType,
    export_program,
)
from autopar.lowering.programs import PipelineProgram, SpmdProgram
from autopar.state.distributed_array import DistributedArray

from .emit import emit
from .instructions import Held, InstructionList, Send, Value, made_and_used, step_inputs
from .ray_arrays import is_on_workers
from .ray_executable import comes_back, refuse_traced
from .ray_job import Crossing
from .ray_steps import JobParts, LoadedJob
from .ray_workers import Workers
from .schedule import Schedule
from .simulate import simulate
from .timeline import Timeline


class RayPipelineExecutable:
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
        groups = HostGroups.of(sizes, cluster.devices_per_host)
        submeshes = schedule.submesh_by_stage
        self.program = program
        self.instructions = emit(program, schedule)
        simulate(self.instructions)  # refuses a deadlock before any host waits
        assert cluster.ray_hosts is not None, "the cluster is one of Ray"
        platform = cluster.ray_hosts.lowering_platform
        first_device = {i: groups.places[on][1] for i, on in submeshes.items()}
        exported = [
            export_program(code, platform).at(first_device[stage.stage])
            for stage, code in zip(program.programs, codes, strict=True)
        ]
        types = _types_of(program, exported, first_device)
        self._inputs = [key for keys in step_inputs(self.instructions) for key in keys]
        made = {
            key
            for list_ in self.instructions
            for instruction in list_.instructions
            for key in made_and_used(instruction)[0]
        }
        self._state = {
            name: (slot.stage, Value(name))
            for name, slot in program.slots.items()
            if slot.kind == "state"
        }
        self._updated = {name for name, key in self._state.items() if key in made}
        self._results = {
            name: _result_keys(program, name, made)
            for name, slot in program.slots.items()
            if slot.kind == "result"
        }
        result_keys = [key for keys in self._results.values() for key in keys]
        ends = {*self._inputs, *self._state.values(), *result_keys}
        self._returned = {
            key
            for key in (*result_keys, *(self._state[name] for name in self._updated))
            if comes_back(types[key[1].slot, key[0]], key not in result_keys)
        }
        self._large = set(result_keys) - self._returned
        parts = JobParts(
            f"pipeline of {program.num_stages} stages",
            self.instructions,
            groups,
            submeshes,
            {
                i: (stage.stage, code, spmd.constants)
                for i, (stage, code, spmd) in enumerate(
                    zip(program.programs, exported, codes, strict=True)
                )
            },
            {key: types[key[1].slot, key[0]] for key in self._inputs},
            {
                key: types[key[1].slot, key[0]]
                for key in ends
                if (key[1].slot, key[0]) in types
            },
            {
                (stage.stage, Value(stage.inputs[i]))
                for stage, code in zip(program.programs, exported, strict=True)
                for i in code.donated
            },
            {
                (slot.stage, Value(name)): types[name, slot.stage]
                for name, slot in program.slots.items()
                if slot.kind == "gradient"
            },
            _crossing(self.instructions, types, groups, submeshes),
        )
        self._job = LoadedJob(cluster, parts)

    def __call__(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step: the new state and the results, by slot name.

        State comes back as handles to arrays of the workers, also what was given as
        ordinary arrays.

        Raises:
          HostLostError, WorkerError, RuntimeError: see `Workers.call`.
        """
        new_state, results, _ = self._step(state, batch, is_recorded=False)
        return new_state, results

    def record(
        self, state: Mapping[str, Any], batch: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
        """A step that waits for every run, and when each task ran, on one clock."""
        return self._step(state, batch, is_recorded=True)

    @property
    def workers(self) -> Workers:
        """The workers that run it."""
        return self._job.get().workers

    def close(self) -> None:
        """End the workers, with all arrays that they keep."""
        self._job.close()

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
        remote, returned, timeline = self._job.get(given.values())(
            given, kept, self._returned, is_recorded
        )
        ends: dict[Held, Any] = {
            **{key: DistributedArray((array,)) for key, array in remote.items()},
            **returned,
        }
        new_state = {n: ends.get(key, state[n]) for n, key in self._state.items()}
        results = {
            name: ends[keys[0]]
            if keys[0][1].microbatch is None
            else [ends[key] for key in keys]
            for name, keys in self._results.items()
        }
        return new_state, results, timeline


def _types_of(
    program: PipelineProgram,
    exported: Sequence[ExportedProgram],
    first_device: Mapping[int, int],
) -> dict[tuple[str, int], ShardedType]:
    """The type of every slot on each stage that makes, holds or reads it."""
    types: dict[tuple[str, int], ShardedType] = {}
    for stage, code in zip(program.programs, exported, strict=True):
        found = [
            *zip(stage.inputs, code.inputs, strict=True),
            *zip(stage.outputs, code.outputs, strict=True),
        ]
        for name, type_ in found:
            types.setdefault((name, stage.stage), type_)
    for (name, stage), sharding in program.shardings.items():
        own = types.get((name, stage))
        if own is None:
            other = next((t for (n, _), t in types.items() if n == name), None)
            if other is not None:  # held by a stage none of whose programs uses it
                type_ = ShardedType.of(other.shape, other.dtype, sharding)
                types[name, stage] = type_.at(first_device[stage])
    return types


def _result_keys(
    program: PipelineProgram, name: str, made: set[Held]
) -> tuple[Held, ...]:
    """What a result slot holds at the end: one value, or one for each microbatch."""
    stage = program.slots[name].stage
    once = (stage, Value(name))
    if once in made:
        return (once,)
    return tuple((stage, Value(name, i)) for i in range(program.num_microbatches))


def _crossing(
    lists: Sequence[InstructionList],
    types: Mapping[tuple[str, int], ShardedType],
    groups: HostGroups,
    submesh_of_stage: Mapping[int, int],
) -> dict[tuple[str, int], Crossing]:
    """Each slot that is sent, by the stage that it is sent to."""

    def ranks(stage: int) -> tuple[int, ...]:
        group, _ = groups.places[submesh_of_stage[stage]]
        return tuple(groups.ranks_of(group))

    return {
        (send.value.slot, send.target): Crossing(
            types[send.value.slot, send.source],
            types[send.value.slot, send.target],
            ranks(send.source),
            ranks(send.target),
        )
        for list_ in lists
        for send in list_.instructions
        if isinstance(send, Send)
    }
