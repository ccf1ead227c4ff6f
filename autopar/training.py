"""A training that goes on from its last checkpoint when a host is lost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from .api import ParallelFunction
from .clusters.cluster import Cluster
from .errors import HostLostError, WorkerError
from .methods.fewer_hosts import fit_hosts
from .steps.execution import Checkpoints, cluster_left

_log = logging.getLogger("autopar")
_MOST_FAILURES = 3  # one after the other, without a step that is new


@dataclass(frozen=True)
class Recovery:
    """One fault that a training went on from.

    Attributes:
      error: what was lost, in words.
      at_step: the step that was running.
      from_step: the first step that was run again.
      num_hosts: with how many hosts it went on.
      seconds: from the error until the first step of the new workers was done.
    """

    error: str
    at_step: int
    from_step: int
    num_hosts: int
    seconds: float


class Training:
    """Runs a step again and again, and goes on when a host of it is lost.

        def batches(position):
            return autopar.Batches(data, like, position=position, seed=0)

        with autopar.Checkpoints("run") as checkpoints:
            training = autopar.Training(
                step, checkpoints, init_fn, rng, batches=batches, save_every=100
            )
            for number, metrics in training.run(10_000):
                print(number, metrics["loss"])

    When a host dies or hangs, all workers are ended and `on_failure` of the cluster
    says what comes next: the step is planned for the hosts that are left, or they are
    waited for; new workers start, read the last checkpoint, and the data goes on where
    it was then. Numbers of steps since that checkpoint come a second time. A new
    process goes on from the checkpoints that it finds. With `steps_ahead` of a Ray
    cluster as many more steps are begun before the metrics of one are given.

    Args:
      step: takes a state and a batch, returns the next state and metrics.
      checkpoints: where the state is kept; hosts of a cluster share its directory.
      init_fn: returns the first state.
      init_args: arguments of `init_fn`.
      batches: makes the batches from a position on, which is None at first: an
        `autopar.Batches`, or any iterator with a `position`.
      save_every: after how many steps the state is saved; it is after the last one too.

    Raises:
      ValueError: `save_every` is below one.
    """

    def __init__(
        self,
        step: ParallelFunction,
        checkpoints: Checkpoints,
        init_fn: Callable[..., Any],
        *init_args: Any,
        batches: Callable[[Any], Any],
        save_every: int = 100,
    ) -> None:
        if save_every < 1:
            raise ValueError(
                f"A state is saved after 1 step or more, but got save_every="
                f"{save_every}."
            )
        self.step, self.checkpoints, self.save_every = step, checkpoints, save_every
        self.recoveries: list[Recovery] = []
        self.state: Any = None
        self._given = step
        self._init, self._batches = (init_fn, *init_args), batches
        self._like: Any = None
        self._num_hosts = self._at_step = 0
        self._fault: tuple[HostLostError | WorkerError, int, float] | None = None

    def run(self, num_steps: int) -> Iterator[tuple[int, Any]]:
        """Steps 0 to `num_steps` - 1: the number of each, and its metrics.

        Raises:
          HostLostError: `on_failure` is "raise", hosts did not come back, or hosts were
            lost more than three times without a new step in between.
          WorkerError: an exception on a host; it would come again.
          OSError: a checkpoint could not be written.
          CheckpointError: there are checkpoints, none of which can be read.
        """
        furthest, failures = -1, 0
        while True:
            try:
                for number, metrics in self._from_checkpoint(num_steps):
                    if number > furthest:
                        furthest, failures = number, 0
                    yield number, metrics
                return
            except Exception as error:
                fault, failures = _host_fault(error), failures + 1
                if fault is None or failures > _MOST_FAILURES:
                    raise
                self._recover(fault)

    def _from_checkpoint(self, num_steps: int) -> Iterator[tuple[int, Any]]:
        """The steps after the newest checkpoint, or all of them."""
        first, self.state, position = 0, None, None
        if self.checkpoints.latest() is not None:
            found = self.checkpoints.restore(self._places())
            first, self.state, position = (
                found.step + 1,
                found.state,
                found.data_position,
            )
        batches = self._batches(position)
        waiting: deque[tuple[int, Any]] = deque()
        for number in range(first, num_steps):
            self._at_step = number
            batch = next(batches)
            if self.state is None:
                init, *given = self._init
                self.state = self.step.init(init, *given, batch=_shapes(batch))
            self.state, metrics = self.step(self.state, batch)
            waiting.append((number, metrics))
            is_last = number + 1 == num_steps
            if (number + 1) % self.save_every == 0 or is_last:
                self._wait_for(metrics, first)
                at = batches.position
                self.checkpoints.save(number, self.state, data_position=at)
            while len(waiting) > (0 if is_last else self._steps_ahead):
                self._wait_for(waiting[0], first)
                yield waiting.popleft()
        self.checkpoints.wait()

    def _wait_for(self, metrics: Any, first: int) -> None:
        """Meet a fault of a step here, and not where its metrics are read."""
        if self._steps_ahead:
            jax.block_until_ready(metrics)
        self._note_recovery(first)

    @property
    def _steps_ahead(self) -> int:
        """How many steps are begun before the metrics of one are given."""
        cluster = self._given.options.cluster
        hosts = None if cluster is None else cluster.ray_hosts
        return 0 if hosts is None else hosts.steps_ahead

    def _places(self) -> Any:
        """The state as shapes in the places of the step's plan."""
        if self._like is None:
            self._like = _shapes(next(self._batches(None)))
        init, *given = self._init
        return self.step.abstract_state(init, *given, batch=self._like)

    def _recover(self, fault: HostLostError | WorkerError) -> None:
        """Has the step run on the hosts that are left."""
        start, cluster = time.monotonic(), self._given.options.cluster
        hosts = None if cluster is None else cluster.ray_hosts
        if cluster is None or hosts is None or hosts.on_failure == "raise":
            raise fault
        _log.warning("a host was lost in step %d: %s", self._at_step, fault.args[0])
        try:
            self.checkpoints.wait()
        except OSError as error:  # its workers are gone; the one before stays
            _log.warning("%s", error)
        self.state = None
        self.step.close()
        self._num_hosts = (left := cluster_left(cluster)).num_hosts
        self.step = step_on(self._given, left)
        if self._fault is None:  # else the same one, which went on
            self._fault = fault, self._at_step, start

    def _note_recovery(self, first: int) -> None:
        if self._fault is None:
            return
        fault, at_step, start = self._fault
        self._fault = None
        text, seconds = str(fault.args[0]), time.monotonic() - start
        recovery = Recovery(text, at_step, first, self._num_hosts, seconds)
        _log.warning("went on: %s", recovery)
        self.recoveries.append(recovery)


def step_on(step: ParallelFunction, cluster: Cluster) -> ParallelFunction:
    """A step for other hosts of its cluster, with its method and mesh fitted to them.

    The step itself where the hosts are as many.
    """
    options = step.options
    assert options.cluster is not None, "it runs on a Ray cluster"
    if cluster == options.cluster:
        return step
    method, mesh, used = fit_hosts(
        options.method, options.mesh, options.cluster, cluster
    )
    fitted = replace(options, method=method, mesh=mesh, cluster=used, plan=None)
    return ParallelFunction(vars(step)["__wrapped__"], fitted)


def _host_fault(error: BaseException) -> HostLostError | WorkerError | None:
    """The loss of a host that an error tells of, or that is its cause."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, HostLostError):
            return found
        if isinstance(found, WorkerError):
            return found if found.is_echo else None
        found = found.__cause__ or found.__context__
    return None


def _shapes(batch: Any) -> Any:
    """A batch as shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
