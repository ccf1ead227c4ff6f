"""A job on the workers of a Ray cluster, and its steps.

From the driver go the batch, each host its shards, and state that it is given as an
ordinary array, once. To the driver come results of at most `METRIC_BYTES`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_hosts import HostGroups
from autopar.lowering.exported_program import (
    ExportedProgram,
    ShardedType,
    export_program,
    plain_array,
    with_keys,
)
from autopar.lowering.programs import PipelineProgram, SpmdProgram
from autopar.state.distributed_array import DistributedArray
from autopar.state.examples import LoadedRows

from .emit import result_keys, state_keys
from .instructions import Held, InstructionList, Send, Value, step_inputs
from .ray_arrays import PendingArray, PendingStep, RemoteArray, StepEnd
from .ray_job import (
    Block,
    Blocks,
    Crossing,
    HostJob,
    LoadedPart,
    StageCode,
    StepReply,
    StepRequest,
    cut_for_hosts,
    join_blocks,
)
from .ray_workers import Workers, workers_of
from .stored_arrays import StoredArray
from .timeline import Event, Timeline

METRIC_BYTES = 64 * 1024  # larger results stay on the workers


@dataclass(frozen=True, eq=False)
class JobParts:
    """A job before it is dealt out to hosts.

    `program` is never run here; `codes` are its stage programs, in its order, with the
    arrays that they close over. `lists` has what each submesh does, `groups` where
    these lie, `submesh_of_stage` which one runs and holds what is of a stage.
    """

    program: PipelineProgram
    codes: tuple[tuple[ExportedProgram, Sequence[Any]], ...]
    lists: tuple[InstructionList, ...]
    groups: HostGroups
    submesh_of_stage: Mapping[int, int]

    @staticmethod
    def of(
        program: PipelineProgram,
        codes: Sequence[SpmdProgram],
        lists: tuple[InstructionList, ...],
        submesh_of_stage: Mapping[int, int],
        cluster: Cluster,
        sizes: Sequence[int],
    ) -> JobParts:
        """That of stage programs lowered for abstract meshes.

        Raises:
          NotImplementedError: see `HostGroups.of` and `export_program`.
        """
        assert cluster.ray_hosts is not None, "the cluster is one of Ray"
        platform = cluster.ray_hosts.lowering_platform
        groups = HostGroups.of(sizes, cluster.devices_per_host)
        exported = []
        for stage, code in zip(program.programs, codes, strict=True):
            _, first_device = groups.places[submesh_of_stage[stage.stage]]
            made = export_program(code, platform).at(first_device)
            exported.append((made, code.constants))
        return JobParts(program, tuple(exported), lists, groups, submesh_of_stage)

    @cached_property
    def types(self) -> dict[tuple[str, int], ShardedType]:
        """The type of every slot on each stage that makes, holds or reads it."""
        types: dict[tuple[str, int], ShardedType] = {}
        for stage, (code, _) in zip(self.program.programs, self.codes, strict=True):
            names = (*stage.inputs, *stage.outputs)
            for name, type_ in zip(names, (*code.inputs, *code.outputs), strict=True):
                types.setdefault((name, stage.stage), type_)
        for (name, stage), sharding in self.program.shardings.items():
            other = next((t for (n, _), t in types.items() if n == name), None)
            # It may be held by a stage none of whose programs uses it.
            if (name, stage) not in types and other is not None:
                type_ = ShardedType.of(other.shape, other.dtype, sharding)
                _, first_device = self.groups.places[self.submesh_of_stage[stage]]
                types[name, stage] = type_.at(first_device)
        return types

    @cached_property
    def inputs(self) -> dict[Held, ShardedType]:
        """What a step begins with."""
        keys = [key for keys in step_inputs(self.lists) for key in keys]
        return {key: self.types[key[1].slot, key[0]] for key in keys}

    @cached_property
    def results(self) -> dict[str, tuple[Held, ...]]:
        """What each result slot holds in the end."""
        return result_keys(self.program, self.lists)

    @cached_property
    def ends(self) -> dict[Held, ShardedType]:
        """What may be asked for when a step is done."""
        results = (key for keys in self.results.values() for key in keys)
        ends = {*self.inputs, *state_keys(self.program).values(), *results}
        found = ((key, self.types.get((key[1].slot, key[0]))) for key in ends)
        return {key: type_ for key, type_ in found if type_ is not None}

    @cached_property
    def donated(self) -> set[Held]:
        """The inputs whose memory a step may take."""
        return {
            (stage.stage, Value(stage.inputs[i]))
            for stage, (code, _) in zip(self.program.programs, self.codes, strict=True)
            for i in code.donated
        }

    @cached_property
    def crossing(self) -> dict[tuple[str, int], Crossing]:
        """Each slot that is sent, by the stage that it is sent to."""
        types = self.types
        return {
            (send.value.slot, send.target): Crossing(
                types[send.value.slot, send.source],
                types[send.value.slot, send.target],
                *(
                    tuple(self.groups.ranks_of(self.group_of(stage)))
                    for stage in (send.source, send.target)
                ),
            )
            for list_ in self.lists
            for send in list_.instructions
            if isinstance(send, Send)
        }

    def group_of(self, stage: int) -> int:
        """The group of hosts that runs a stage."""
        return self.groups.places[self.submesh_of_stage[stage]][0]


@dataclass
class _Inputs:
    """The inputs of a group of hosts in one step, by position.

    `held` they keep, `fed` comes from the driver, each host its part, and `stored` and
    `loaded` they read.
    """

    held: dict[int, RemoteArray] = field(default_factory=dict)
    fed: dict[int, list[Blocks]] = field(default_factory=dict)
    stored: dict[int, StoredArray] = field(default_factory=dict)
    loaded: dict[int, LoadedPart] = field(default_factory=dict)


class RayJob:
    """A job that is loaded on workers, and its steps."""

    def __init__(self, workers: Workers, parts: JobParts) -> None:
        self.workers, self.parts = workers, parts
        self._number = workers.new_number()
        self._inputs = self._by_group(parts.inputs)
        self._ends = self._by_group(parts.ends)
        jobs = {
            rank: (self._number, self._for_host(rank, group, index))
            for group in range(workers.num_groups)
            for index, rank in enumerate(workers.ranks_of(group))
        }
        workers.call("load", jobs)

    def __call__(
        self,
        given: Mapping[Held, Any],
        kept: Collection[Held],
        returned: Collection[Held],
        is_recorded: bool = False,
    ) -> tuple[dict[Held, RemoteArray], dict[Held, Any], Timeline]:
        """One step: what stays on the workers, and what comes to the driver.

        With `steps_ahead` it returns before the step is done, and what is to come is a
        `DistributedArray`, unless something is asked for that must be there.
        """
        workers, ends = self.workers, self.parts.ends
        with workers.one_step:
            groups = range(workers.num_groups)
            asked = [self._sorted(given, group) for group in groups]
            numbers = {key: workers.new_number() for key in kept}
            freed = workers.freed_by_rank(groups)
            calls: dict[int, tuple[bytes, dict[int, Blocks]]] = {}
            for group, inputs in enumerate(asked):
                ranks, keys = workers.ranks_of(group), self._ends[group]
                request = StepRequest(
                    self._number,
                    {i: array.number for i, array in inputs.held.items()},
                    inputs.stored,
                    inputs.loaded,
                    {i: numbers[key] for i, key in enumerate(keys) if key in numbers},
                    tuple(i for i, key in enumerate(keys) if key in returned),
                    freed[ranks[0]],
                    is_recorded,
                )
                packed = pickle.dumps(request)
                for index, rank in enumerate(ranks):
                    fed = {i: shards[index] for i, shards in inputs.fed.items()}
                    calls[rank] = packed, fed
            finish = workers.begin("step", calls)
            step = PendingStep(partial(self._end, finish, asked))
            remote = {
                key: RemoteArray(workers, self._group(key), number, ends[key], step)
                for key, number in numbers.items()
            }
            if is_recorded or not workers.let_run(step, self._may_wait(returned)):
                end = step.wait()
                return remote, dict(end.results), end.timeline
            for group, inputs in enumerate(asked):
                for i, array in inputs.held.items():
                    if self._inputs[group][i] in self.parts.donated:
                        array.may_be_taken_by(step)
            results = {k: PendingArray(step, k, ends[k]) for k in returned}
            return (
                remote,
                {k: DistributedArray((each,)) for k, each in results.items()},
                Timeline(len(self.parts.lists), ()),
            )

    def _may_wait(self, returned: Collection[Held]) -> bool:
        """Whether nothing that comes back must be an array of this process at once.

        Keys must, and what is put together of microbatches.
        """
        ends = self.parts.ends
        return not any(
            k[1].microbatch is not None or ends[k].key_impl for k in returned
        )

    def _end(
        self, finish: Callable[[], list[StepReply]], asked: Sequence[_Inputs]
    ) -> StepEnd:
        """Waits for the replies to a step."""
        replies = finish()
        for rank, reply in enumerate(replies):
            donated = {*reply.donated}
            for array in asked[self.workers.group_of(rank)].held.values():
                if array.number in donated:
                    array.mark_donated()
        return StepEnd(self._results(replies), self._timeline(replies))

    def _group(self, key: Held) -> int:
        return self.parts.group_of(key[0])

    def _by_group(self, keys: Collection[Held]) -> list[tuple[Held, ...]]:
        """The keys of each group of hosts."""
        groups = range(self.workers.num_groups)
        return [tuple(k for k in keys if self._group(k) == group) for group in groups]

    def _sorted(self, given: Mapping[Held, Any], group: int) -> _Inputs:
        """What a group keeps, the rest cut for its hosts, and what these read."""
        found = _Inputs()
        for i, key in enumerate(self._inputs[group]):
            type_, array = self.parts.inputs[key], given[key]
            if isinstance(array, DistributedArray) and len(array.chunks) == 1:
                array = array.chunks[0]
            if isinstance(array, RemoteArray) and self._is_here(array, key):
                array.check()
                found.held[i] = array
            elif isinstance(array, StoredArray):
                found.stored[i] = array
            elif isinstance(array, LoadedRows):
                number = self.workers.source_number(array.source, group)
                row = array.first, array.leaf, array.start, array.stride
                found.loaded[i] = LoadedPart(number, *row)
            else:
                whole = plain_array(array).astype(type_.dtype, copy=False)
                num_hosts = self.workers.num_hosts[group]
                found.fed[i] = cut_for_hosts(whole, type_, num_hosts)
        return found

    def _results(self, replies: Sequence[StepReply]) -> dict[Held, jax.Array]:
        """What came back, joined from the hosts that had a part of it."""
        blocks: dict[Held, list[Block]] = {}
        for rank, reply in enumerate(replies):
            keys = self._ends[self.workers.group_of(rank)]
            for i, part in reply.returned.items():
                blocks.setdefault(keys[i], []).extend(part)
        types = ((key, self.parts.ends[key]) for key in blocks)
        return {
            key: with_keys(join_blocks(type_.shape, type_.dtype, blocks[key]), type_)
            for key, type_ in types
        }

    def _is_here(self, array: RemoteArray, key: Held) -> bool:
        """Whether the group that reads an array keeps it.

        Raises:
          ValueError: other workers do: it would pass through the driver.
        """
        if array.keeper is self.workers and array.group == self._group(key):
            return True
        if array.keeper is not self.workers and array.keeper.lost is not None:
            array.check()
        if array.type.nbytes <= METRIC_BYTES:
            return False
        raise ValueError(
            f"An array of other hosts is used where it lies, but {array.sharding} is "
            f"wanted in group {self._group(key)} of another set of workers; pass "
            f"autopar.fetch(array) to take it through this process."
        )

    def _for_host(self, rank: int, group: int, index: int) -> HostJob:
        parts, hosts = self.parts, self.workers.num_hosts[group]
        programs, slots = parts.program.programs, parts.program.slots.items()

        def code(number: int) -> StageCode:
            exported, constants = parts.codes[number]
            shards = [
                cut_for_hosts(plain_array(value), type_, hosts)[index]
                for value, type_ in zip(constants, exported.constants, strict=True)
            ]
            return StageCode(programs[number].stage, exported, tuple(shards))

        def is_here(stage: int) -> bool:
            return parts.group_of(stage) == group

        places = zip(parts.lists, parts.groups.places, strict=True)
        return HostJob(
            tuple(list_ for list_, (where, _) in places if where == group),
            {n: code(n) for n, each in enumerate(programs) if is_here(each.stage)},
            {key: parts.inputs[key] for key in self._inputs[group]},
            self._ends[group],
            {
                name: parts.types[name, slot.stage]
                for name, slot in slots
                if slot.kind == "gradient" and is_here(slot.stage)
            },
            {key: each for key, each in parts.crossing.items() if each.is_of(rank)},
            parts.submesh_of_stage,
        )

    def _timeline(self, replies: Sequence[StepReply]) -> Timeline:
        """The events of all hosts on one clock, from the first one on."""
        is_recorded = any(reply.events for reply in replies)
        offsets = self.workers.clock_offsets() if is_recorded else [0.0] * len(replies)
        events = [
            (event, offset)
            for reply, offset in zip(replies, offsets, strict=True)
            for event in reply.events
        ]
        first = min((event.start + offset for event, offset in events), default=0.0)
        shifted = [
            Event(e.submesh, e.task, e.start + offset - first, e.end + offset - first)
            for e, offset in events
        ]
        ordered = sorted(shifted, key=lambda event: event.start)
        return Timeline(len(self.parts.lists), tuple(ordered))


class OnHosts:
    """A job on the workers of a cluster, which start with its first step.

    It is loaded again if they were lost.
    """

    def __init__(self, cluster: Cluster, parts: JobParts) -> None:
        self._cluster, self.parts = cluster, parts
        self._job: RayJob | None = None

    @property
    def workers(self) -> Workers:
        """The workers that run it."""
        return self.job().workers

    def job(self, given: Iterable[Any] = ()) -> RayJob:
        """The job, on workers that live as far as is known.

        Raises:
          HostLostError, RuntimeError: new ones would be started, and something `given`
            was lost with those before.
        """
        if self._job is None or self._job.workers.lost is not None:
            leaves = (leaf for leaf in given if isinstance(leaf, DistributedArray))
            for chunk in (chunk for leaf in leaves for chunk in leaf.chunks):
                if isinstance(chunk, RemoteArray) and chunk.keeper.lost is not None:
                    chunk.check()
            workers = workers_of(self._cluster, self.parts.groups.num_hosts)
            self._job = RayJob(workers, self.parts)
        return self._job

    def close(self) -> None:
        """End the workers, with all arrays that they keep."""
        if self._job is not None:
            self._job.workers.close()
