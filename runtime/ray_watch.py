"""Which hosts live: a sign of life from each every second, and waits that it bounds.

No wait inside a worker can be bounded: a peer that is frozen or gone may leave it in a
collective for ever. So the driver asks all hosts for signs of life, also while no call
is under way: a host that is lost while the driver plans is told at once, in the log.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.clusters.ray_discovery import import_ray
from autopar.errors import HostLostError, WorkerError

from .ray_job import Failure

_EVERY_SECONDS = 1.0
_STOP_SECONDS = 5.0
_CAUSE_SECONDS = 5.0  # Ray knows within a second why a process ended
_NOT_INSTALLED = "No module named 'autopar"
# JAX ends a process 5 s after another of its group fell silent: that one is the cause.
_HUNG_SECONDS = 3.0
_GRACE_SECONDS = 1.0  # after a failure, for others to tell a better reason


class Watched(Protocol):
    """The workers, as what watches them sees them."""

    lost: str | None

    def name(self, rank: int) -> str: ...
    def lose(self, rank: int, reason: str) -> None: ...
    def ping(self, rank: int) -> Future[Any]: ...


class Heartbeat:
    """Watches hosts until their workers are lost or collected, or it is stopped.

    Ray ends a process that uses it after it has left the cluster: stop this before.
    """

    def __init__(self, workers: Watched, num_hosts: int, silent_seconds: float) -> None:
        self._owner = weakref.ref(workers)
        self._num_hosts, self._silent_seconds = num_hosts, silent_seconds
        # Beats are counted and not seconds: this process itself may stand still.
        self._unanswered: Counter[int] = Counter()
        self._pings: dict[Future[Any], int] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="autopar heartbeat", daemon=True
        )
        self._thread.start()

    def silent_seconds(self, rank: int) -> float:
        """For how long a host has given no sign of life."""
        return self._unanswered[rank] * _EVERY_SECONDS

    def stop(self) -> None:
        """Ask for no more."""
        self._is_stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._is_stopped.wait(_EVERY_SECONDS):
            workers = self._owner()
            if workers is None or workers.lost is not None or not self._beat(workers):
                return
            del workers

    def _beat(self, workers: Watched) -> bool:
        """Whether all hosts live, as far as is known, and are asked again."""
        ray = import_ray()
        for ping in [each for each in self._pings if each.done()]:
            rank = self._pings.pop(ping)
            if (error := ping.exception()) is not None:
                hung = [r for r in range(self._num_hosts) if self._is_hung(r)]
                reason = f"{workers.name(rank)} died: {_last_line(error)}"
                if hung:
                    reason = f"{workers.name(hung[0])} has been silent; {reason}"
                workers.lose(hung[0] if hung else rank, reason)
                return False
            self._unanswered[rank] = 0
        self._unanswered.update(self._pings.values())
        for rank in range(self._num_hosts):
            if self.silent_seconds(rank) > self._silent_seconds:
                silent = f"has been silent for {self._silent_seconds:g} s."
                workers.lose(rank, f"{workers.name(rank)} {silent}")
                return False
        try:
            for rank in set(range(self._num_hosts)) - {*self._pings.values()}:
                # Not ray.wait: it would start a cluster if this one was left just now.
                if not ray.is_initialized():
                    return False
                self._pings[workers.ping(rank)] = rank
        except (RuntimeError, ray.exceptions.RayError):
            return False  # this process has left the cluster
        return True

    def _is_hung(self, rank: int) -> bool:
        return self.silent_seconds(rank) >= _HUNG_SECONDS


@dataclass(frozen=True)
class Watch:
    """One call to some hosts.

    `silent` says for how many seconds a host has given no sign of life, `ping` asks for
    one, `name` is a host in words, `seconds` how long the call may take and
    `silent_seconds` how long a host may be silent.
    """

    method: str
    seconds: float
    silent_seconds: float
    silent: Callable[[int], float]
    ping: Callable[[int], Future[Any]]
    name: Callable[[int], str]

    def gather(self, answers: Mapping[Future[Any], int]) -> dict[int, Any]:
        """What the hosts answered, by rank.

        Raises:
          HostLostError: a host died, fell silent, or did not answer in time.
          WorkerError: an exception on a host.
        """
        start, pending = time.monotonic(), dict(answers)
        replies: dict[int, Any] = {}
        while pending:
            ready, _ = wait(pending, _EVERY_SECONDS, FIRST_COMPLETED)
            for each in ready:
                rank = pending.pop(each)
                found = self._answer(each, rank)
                if isinstance(found, WorkerError | HostLostError):
                    silent = [(self.silent(r), r) for r in answers.values()]
                    hung = [e for e in silent if e[0] >= _HUNG_SECONDS and e[1] != rank]
                    cause = self._first_cause(found, pending)
                    if hung:
                        raise self._silent(*max(hung)) from cause
                    raise cause
                replies[rank] = found
            self._check_time(time.monotonic() - start, sorted(pending.values()))
        return replies

    def _answer(self, answer: Future[Any], rank: int) -> Any:
        """What a host returned, or the error that tells why it did not."""
        try:
            reply = answer.result()
        except ConnectionError as error:
            return self._failed(self._why_ended(error, rank), rank)
        except import_ray().exceptions.RayError as error:
            return self._failed(error, rank)
        if isinstance(reply, Failure):
            text = f"{self.name(rank)} raised in {reply.method!r}: {reply.summary}"
            return WorkerError(text, rank, reply.traceback, reply.is_echo)
        return reply

    def _why_ended(self, error: Exception, rank: int) -> Exception:
        """Why a connection ended: Ray knows it of a process that did."""
        try:
            cause = self.ping(rank).exception(_CAUSE_SECONDS)
        except (TimeoutError, RuntimeError, import_ray().exceptions.RayError):
            cause = None
        return cause if isinstance(cause, Exception) else error

    def _failed(self, error: Exception, rank: int) -> HostLostError | WorkerError:
        """What a failure of Ray itself means."""
        name = self.name(rank)
        if _NOT_INSTALLED in str(error):
            return WorkerError(
                f"Every host must have autopar, as the driver has, but {name} has not; "
                f"pip install 'autopar[ray]' there, where `ray start` runs.",
                rank,
            )
        if isinstance(error, ConnectionError | import_ray().exceptions.RayActorError):
            return HostLostError(
                f"Every host must live until its step is done, but {name} died in "
                f"{self.method!r}: {_last_line(error)} Its arrays are gone; restore "
                f"them from a checkpoint and call again, which starts new workers.",
                rank,
            )
        return WorkerError(f"{name} failed in {self.method!r}: {error}", rank)

    def _first_cause(
        self, found: Exception, pending: Mapping[Future[Any], int]
    ) -> Exception:
        """Of failures that follow each other within a second, the one to tell."""
        failures, left = [found], dict(pending)
        end = time.monotonic() + _GRACE_SECONDS
        while left and (seconds := end - time.monotonic()) > 0:
            for each in wait(left, seconds, FIRST_COMPLETED)[0]:
                answer = self._answer(each, left.pop(each))
                if isinstance(answer, WorkerError | HostLostError):
                    failures.append(answer)

        def weight(failure: Exception) -> int:
            if isinstance(failure, HostLostError):
                return 0
            return 2 if getattr(failure, "is_echo", False) else 1

        return min(failures, key=weight)

    def _silent(self, seconds: float, rank: int) -> HostLostError:
        return HostLostError(
            f"Every host must answer while it works, but {self.name(rank)} "
            f"has been silent for {seconds:.0f} s in {self.method!r}. All "
            f"workers are ended; call again from a checkpoint.",
            rank,
        )

    def _check_time(self, seconds: float, ranks: list[int]) -> None:
        """Does nothing while the hosts that have not answered may go on."""
        silent = max(((self.silent(rank), rank) for rank in ranks), default=(0.0, 0))
        if silent[0] > self.silent_seconds:
            raise self._silent(*silent)
        if ranks and seconds > self.seconds:
            names = ", ".join(self.name(rank) for rank in ranks)
            raise HostLostError(
                f"A call must be done in {self.seconds:g} s, but in {self.method!r} "
                f"{names} is not. All workers are ended; pass a larger step_seconds to "
                f"Cluster.ray() if the step is that long.",
                ranks[0],
            )


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip()
