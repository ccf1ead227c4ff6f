"""A job on the workers of a Ray cluster, and its steps.

From the driver go the batch, each host its shards, and state that it is given as an
ordinary array, once. To the driver come results of at most `METRIC_BYTES`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_hosts import HostGroups
from autopar.data.examples import LoadedRows
from autopar.lowering.exported_program import (
    ExportedProgram,
    ShardedType,
    plain_array,
    with_keys,
)
from autopar.state.distributed_array import DistributedArray

from .instructions import Held, InstructionList
from .ray_arrays import PendingArray, PendingStep, RemoteArray, StepEnd
from .ray_job import (
    Block,
    Crossing,
    HostJob,
    HostShards,
    LoadedPart,
    StageCode,
    StepReply,
    StepRequest,
    cut_for_hosts,
    join_blocks,
)
from .ray_sources import source_number
from .ray_workers import Workers, workers_of
from .stored_arrays import StoredArray
from .timeline import Event, Timeline

METRIC_BYTES = 64 * 1024  # larger results stay on the workers


@dataclass(frozen=True)
class JobParts:
    """A job before it is dealt out to hosts.

    `lists` has what each submesh does, `groups` where these lie, `submesh_of_stage`
    which one runs and holds what is of a stage. `programs` are stage programs with the
    arrays they close over; `inputs` and `ends` are what a step begins and ends with,
    `donated` the inputs whose memory it may take; see `HostJob` for the rest.
    """

    name: str
    lists: tuple[InstructionList, ...]
    groups: HostGroups
    submesh_of_stage: Mapping[int, int]
    programs: Mapping[int, tuple[int, ExportedProgram, Sequence[Any]]]
    inputs: Mapping[Held, ShardedType]
    ends: Mapping[Held, ShardedType]
    donated: Collection[Held]
    zeros: Mapping[Held, ShardedType] = field(default_factory=dict)
    crossing: Mapping[tuple[str, int], Crossing] = field(default_factory=dict)


@dataclass
class _Inputs:
    """The inputs of a group of hosts in one step, by position.

    `held` they keep, `fed` comes from the driver, each host its part, and `stored` and
    `loaded` they read.
    """

    held: dict[int, RemoteArray] = field(default_factory=dict)
    fed: dict[int, list[HostShards]] = field(default_factory=dict)
    stored: dict[int, StoredArray] = field(default_factory=dict)
    loaded: dict[int, LoadedPart] = field(default_factory=dict)


class RayJob:
    """A job that is loaded on workers, and its steps."""

    def __init__(self, workers: Workers, parts: JobParts) -> None:
        self.workers, self.parts = workers, parts
        self._number = workers.new_job()
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

        Raises:
          HostLostError, WorkerError, RuntimeError: see `Workers.call`.
        """
        workers, ends = self.workers, self.parts.ends
        with workers.one_step:
            groups = range(workers.num_groups)
            asked = [self._sorted(given, group) for group in groups]
            numbers = dict(zip(kept, workers.fresh_numbers(len(kept)), strict=True))
            freed = workers.freed_by_rank(groups)
            calls: dict[int, tuple[bytes, dict[int, HostShards]]] = {}
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
            self._mark_donated(asked[self.workers.group_of(rank)], reply)
        return StepEnd(self._results(replies), self._timeline(replies))

    def _group(self, key: Held) -> int:
        return self._group_of_stage(key[0])

    def _group_of_stage(self, stage: int) -> int:
        group, _ = self.parts.groups.places[self.parts.submesh_of_stage[stage]]
        return group

    def _by_group(self, keys: Collection[Held]) -> list[tuple[Held, ...]]:
        """The keys of each group of hosts."""
        groups = range(self.workers.num_groups)
        return [tuple(k for k in keys if self._group(k) == group) for group in groups]

    def _sorted(self, given: Mapping[Held, Any], group: int) -> _Inputs:
        """What a group keeps, the rest cut for its hosts, and what these read."""
        found = _Inputs()
        for i, key in enumerate(self._inputs[group]):
            type_, array = self.parts.inputs[key], given[key]
            if isinstance(array, DistributedArray) and len(array.pieces) == 1:
                array = array.pieces[0]
            if isinstance(array, RemoteArray) and self._is_here(array, key):
                array.check()
                found.held[i] = array
            elif isinstance(array, StoredArray):
                found.stored[i] = array
            elif isinstance(array, LoadedRows):
                number = source_number(self.workers, array.source, group)
                row = array.first, array.leaf, array.start, array.stride
                found.loaded[i] = LoadedPart(number, *row)
            else:
                whole = plain_array(array).astype(type_.dtype, copy=False)
                num_hosts = self.workers.num_hosts[group]
                found.fed[i] = cut_for_hosts(whole, type_, num_hosts)
        return found

    def _mark_donated(self, inputs: _Inputs, reply: StepReply) -> None:
        donated = set(reply.donated)
        for array in inputs.held.values():
            if array.number in donated:
                array.mark_donated()

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

        def here(stage: int) -> bool:
            return self._group_of_stage(stage) == group

        def code(number: int) -> StageCode:
            stage, exported, constants = parts.programs[number]
            shards = [
                cut_for_hosts(plain_array(value), type_, hosts)[index]
                for value, type_ in zip(constants, exported.constants, strict=True)
            ]
            return StageCode(stage, exported, tuple(shards))

        places = zip(parts.lists, parts.groups.places, strict=True)
        return HostJob(
            parts.name,
            tuple(list_ for list_, (where, _) in places if where == group),
            {n: code(n) for n, (stage, *_) in parts.programs.items() if here(stage)},
            {key: parts.inputs[key] for key in self._inputs[group]},
            self._ends[group],
            {
                value.slot: type_
                for (stage, value), type_ in parts.zeros.items()
                if here(stage)
            },
            {key: each for key, each in parts.crossing.items() if each.is_of(rank)},
            parts.submesh_of_stage,
        )

    def _timeline(self, replies: Sequence[StepReply]) -> Timeline:
        """The events of all hosts on one clock, from the first one on."""
        events: list[Event] = []
        if any(reply.events for reply in replies):
            offsets = self.workers.clock_offsets()
            for rank, reply in enumerate(replies):
                shift = offsets[rank]
                events += [
                    Event(e.submesh, e.task, e.start + shift, e.end + shift)
                    for e in reply.events
                ]
        first = min((event.start for event in events), default=0.0)
        ordered = sorted(events, key=lambda event: event.start)
        shifted = [
            Event(e.submesh, e.task, e.start - first, e.end - first) for e in ordered
        ]
        return Timeline(len(self.parts.lists), tuple(shifted))


class LoadedJob:
    """A job on the workers of a cluster, loaded again if they were lost."""

    def __init__(self, cluster: Cluster, parts: JobParts) -> None:
        self._cluster, self._parts = cluster, parts
        self._job: RayJob | None = None

    def get(self, given: Iterable[Any] = ()) -> RayJob:
        """The job, on workers that live as far as is known.

        Raises:
          HostLostError, RuntimeError: new ones would be started, and something `given`
            was lost with those before.
        """
        if self._job is None or self._job.workers.lost is not None:
            for array in given:
                for piece in (
                    array.pieces if isinstance(array, DistributedArray) else ()
                ):
                    if isinstance(piece, RemoteArray) and piece.keeper.lost is not None:
                        piece.check()
            workers = workers_of(self._cluster, self._parts.groups.num_hosts)
            self._job = RayJob(workers, self._parts)
        return self._job

    def close(self) -> None:
        """End the workers, with all arrays that they keep."""
        if self._job is not None:
            self._job.workers.close()
