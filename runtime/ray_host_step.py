"""A step on one host: a lane for each of its submeshes, and how they reach others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.lowering.programs import PipelineProgram

from .instructions import Held, Instruction, Value
from .lane import Lane, Step
from .ray_crossing import Crossing
from .ray_job import HostJob
from .ray_programs import load_job, sharding_of
from .ray_transport import Transport
from .ray_trap import point_of
from .timeline import Event
from .transfer_plan import plan_transfer
from .transfers import Transfer

_RUNS_IN_FLIGHT = 2


@dataclass
class LoadedHostJob:
    """A job of this host, compiled; `transfers` are those that stay on its devices."""

    data: HostJob
    program: PipelineProgram
    transfers: dict[tuple[str, int], Transfer]

    def __post_init__(self) -> None:
        self.unfinished = tuple(deque[Any]() for _ in self.data.lists)
        self.threads = ThreadPoolExecutor(len(self.data.lists) or 1, "autopar-submesh")

    @staticmethod
    def of(data: HostJob) -> LoadedHostJob:
        """The job, with its programs compiled."""
        return LoadedHostJob(
            data,
            load_job(data),
            {
                key: _transfer_inside(each)
                for key, each in data.crossing.items()
                if each.is_inside
            },
        )

    def run(
        self, step: HostStep, inputs: Mapping[Held, Any]
    ) -> tuple[dict[Held, Any], tuple[Event, ...]]:
        """What the submeshes hold in the end, and what was recorded.

        Raises:
          Exception: the first one of any lane. Others may still wait for other hosts:
            this process can only be ended then.
        """
        submesh_of = self.data.submesh_of_stage
        lanes = [
            Lane(
                step,
                list_,
                _RUNS_IN_FLIGHT,
                unfinished,
                {k: x for k, x in inputs.items() if submesh_of[k[0]] == list_.submesh},
            )
            for list_, unfinished in zip(self.data.lists, self.unfinished, strict=True)
        ]
        if len(lanes) == 1:
            lanes[0].run()
        else:
            running = {self.threads.submit(lane.run) for lane in lanes}
            while running and step.error is None:
                _, running = wait(running, return_when=FIRST_COMPLETED)
        if step.error is not None:
            raise step.error
        step.wait_for_readers()
        held = {key: array for lane in lanes for key, array in lane.held.items()}
        return held, tuple(event for lane in lanes for event in lane.events)


class HostStep:
    """What the lanes of this host share: queues between them, the way to other hosts.

    Arguments:
      reach: told of every point that a lane gets to.
    """

    start = 0.0  # events are in seconds of the host's own clock

    def __init__(
        self,
        job: LoadedHostJob,
        transport: Transport | None,
        is_recorded: bool,
        reach: Callable[[str], None],
    ) -> None:
        self.is_recorded = is_recorded
        self._inside = Step(job.program, job.transfers, is_recorded)
        self._transport, self._reach = transport, reach
        here = {list_.submesh for list_ in job.data.lists}
        stages = job.data.submesh_of_stage.items()
        self._stages = frozenset(stage for stage, submesh in stages if submesh in here)

    @property
    def program(self) -> PipelineProgram:
        """The programs of this host."""
        return self._inside.program

    @property
    def is_stopped(self) -> bool:
        """Whether a lane failed."""
        return self._inside.is_stopped

    @property
    def error(self) -> BaseException | None:
        """Why it failed."""
        return self._inside.error

    def begin(self, instruction: Instruction) -> None:
        """Tell the host where it is."""
        self._reach(point_of(instruction))

    def send(self, value: Value, source: int, target: int, array: Any) -> None:
        """Hand a value to another stage; waits for nobody."""
        if target in self._stages:
            self._inside.send(value, source, target, array)
            return
        assert self._transport is not None, "a job of one group sends nothing"
        self._transport.send(value, source, target, array)

    def receive(self, value: Value, source: int, target: int) -> Any:
        """The next value from another stage, which waits for it."""
        if source in self._stages:
            return self._inside.receive(value, source, target)
        assert self._transport is not None, "a job of one group receives nothing"
        return self._transport.receive(value, source, target)

    def wait_for_readers(self, arrays: Sequence[Any] | None = None) -> None:
        """Until other hosts have read these arrays, or all that was offered."""
        if self._transport is not None:
            self._transport.wait_for_readers(arrays)

    def fail(self, error: BaseException, note: str) -> None:
        """Keep the first error, and stop the lanes."""
        self._inside.fail(error, note)


def _transfer_inside(crossing: Crossing) -> Transfer:
    """Between submeshes of this host, or stages of one submesh, which get a copy."""
    source, target = crossing.source, crossing.target
    sides = sharding_of(source), sharding_of(target)
    return Transfer(plan_transfer(source.shape, np.dtype(source.dtype), *sides))
