"""A job on the workers of a Ray cluster, and its steps.

From the driver go the batch, each host its shards, and state that it is given as an
ordinary array, once. To the driver come results of at most `METRIC_BYTES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.clusters.cluster import Cluster
from autopar.lowering.exported_program import (
    ExportedProgram,
    ShardedType,
    plain_array,
    with_keys,
)
from autopar.state.distributed_array import DistributedArray

from .instructions import Held, InstructionList
from .ray_arrays import HostShards, RemoteArray, cut_for_hosts, join_blocks
from .ray_job import HostJob, StageCode, StepReply, StepRequest
from .ray_workers import Workers, workers_of
from .stored_arrays import StoredArray
from .timeline import Event, Timeline

METRIC_BYTES = 64 * 1024  # larger results stay on the workers


@dataclass(frozen=True)
class JobParts:
    """A job before it is dealt out to hosts.

    `lists` has what each group of hosts does, `group_of_stage` which group runs and
    holds what is of a stage. `programs` are stage programs with the arrays they close
    over; `inputs` and `ends` are what a step begins and ends with; see `HostJob` for
    the rest.
    """

    name: str
    lists: tuple[InstructionList, ...]
    group_of_stage: Mapping[int, int]
    programs: Mapping[int, tuple[int, ExportedProgram, Sequence[Any]]]
    inputs: Mapping[Held, ShardedType]
    ends: Mapping[Held, ShardedType]
    zeros: Mapping[Held, ShardedType] = field(default_factory=dict)
    crossing: Mapping[tuple[str, int], tuple[ShardedType, ShardedType]] = field(
        default_factory=dict
    )


class RayJob:
    """A job that is loaded on workers, and its steps."""

    def __init__(self, workers: Workers, parts: JobParts) -> None:
        self.workers, self.parts = workers, parts
        self._number = workers.new_job()
        jobs = {
            rank: (self._number, self._for_host(group, index))
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
    ) -> tuple[dict[Held, RemoteArray], dict[Held, jax.Array], Timeline]:
        """One step: what stays on the workers, and what comes to the driver.

        Raises:
          HostLostError, WorkerError, RuntimeError: see `Workers.call`.
        """
        workers, ends = self.workers, self.parts.ends
        with workers.one_step:
            held, fed, stored = self._sort(given)
            order = list(kept)
            numbers = dict(zip(order, workers.fresh_numbers(len(order)), strict=True))
            groups = range(workers.num_groups)
            freed = workers.freed_by_rank(groups)
            requests = {
                rank: (
                    StepRequest(
                        self._number,
                        {
                            k: a.number
                            for k, a in held.items()
                            if self._group(k) == group
                        },
                        {
                            k: each[i]
                            for k, each in fed.items()
                            if self._group(k) == group
                        },
                        {k: s for k, s in stored.items() if self._group(k) == group},
                        {k: n for k, n in numbers.items() if self._group(k) == group},
                        tuple(key for key in returned if self._group(key) == group),
                        freed[rank],
                        is_recorded,
                    ),
                )
                for group in groups
                for i, rank in enumerate(workers.ranks_of(group))
            }
            replies: list[StepReply] = workers.call("step", requests)
            donated = {
                (workers.group_of(r), n)
                for r, x in enumerate(replies)
                for n in x.donated
            }
            for array in held.values():
                if (array.group, array.number) in donated:
                    array.mark_donated()
            remote = {
                key: RemoteArray(workers, self._group(key), number, ends[key])
                for key, number in numbers.items()
            }
            results = {
                key: with_keys(
                    join_blocks(
                        ends[key].shape,
                        ends[key].dtype,
                        [b for reply in replies for b in reply.returned.get(key, ())],
                    ),
                    ends[key],
                )
                for key in returned
            }
            return remote, results, self._timeline(replies)

    def _group(self, key: Held) -> int:
        return self.parts.group_of_stage[key[0]]

    def _sort(
        self, given: Mapping[Held, Any]
    ) -> tuple[
        dict[Held, RemoteArray], dict[Held, list[HostShards]], dict[Held, StoredArray]
    ]:
        """What the workers keep, the rest cut for its hosts, and what these read."""
        held: dict[Held, RemoteArray] = {}
        stored: dict[Held, StoredArray] = {}
        fed: dict[Held, list[HostShards]] = {}
        for key, type_ in self.parts.inputs.items():
            array = given[key]
            if isinstance(array, DistributedArray) and len(array.pieces) == 1:
                array = array.pieces[0]
            if isinstance(array, RemoteArray) and self._is_here(array, key):
                array.check()
                held[key] = array
            elif isinstance(array, StoredArray):
                stored[key] = array
            else:
                whole = plain_array(array).astype(type_.dtype, copy=False)
                fed[key] = cut_for_hosts(whole, type_, self.workers.hosts_per_group)
        return held, fed, stored

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

    def _for_host(self, group: int, index: int) -> HostJob:
        parts = self.parts
        hosts = self.workers.hosts_per_group

        def here(stage: int) -> bool:
            return parts.group_of_stage[stage] == group

        def code(number: int) -> StageCode:
            stage, exported, constants = parts.programs[number]
            shards = [
                cut_for_hosts(plain_array(value), type_, hosts)[index]
                for value, type_ in zip(constants, exported.constants, strict=True)
            ]
            return StageCode(stage, exported, tuple(shards))

        return HostJob(
            parts.name,
            str(parts.lists[group]),
            {n: code(n) for n, (stage, *_) in parts.programs.items() if here(stage)},
            {key: type_ for key, type_ in parts.inputs.items() if here(key[0])},
            {
                value.slot: type_
                for (stage, value), type_ in parts.zeros.items()
                if here(stage)
            },
            parts.crossing,
            parts.group_of_stage,
        )

    def _timeline(self, replies: Sequence[StepReply]) -> Timeline:
        """The events of all hosts on one clock, from the first one on."""
        events: list[Event] = []
        if any(reply.events for reply in replies):
            offsets = self.workers.clock_offsets()
            for rank, reply in enumerate(replies):
                shift, group = offsets[rank], self.workers.group_of(rank)
                events += [
                    Event(group, e.task, e.start + shift, e.end + shift)
                    for e in reply.events
                ]
        first = min((event.start for event in events), default=0.0)
        ordered = sorted(events, key=lambda event: event.start)
        shifted = [
            Event(e.submesh, e.task, e.start - first, e.end - first) for e in ordered
        ]
        return Timeline(self.workers.num_groups, tuple(shifted))


class LoadedJob:
    """A job on the workers of a cluster, loaded again if they were lost."""

    def __init__(self, cluster: Cluster, parts: JobParts) -> None:
        self._cluster, self._parts = cluster, parts
        self._job: RayJob | None = None

    def get(self) -> RayJob:
        """The job, on workers that live as far as is known."""
        if self._job is None or self._job.workers.lost is not None:
            workers = workers_of(self._cluster, len(self._parts.lists))
            self._job = RayJob(workers, self._parts)
        return self._job

    def close(self) -> None:
        """End the workers, with all arrays that they keep."""
        if self._job is not None:
            self._job.workers.close()
