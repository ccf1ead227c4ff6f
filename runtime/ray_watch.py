"""Wait for the answers of hosts, and find out which of them do not live.

No wait inside a worker can be bounded: a peer that is frozen or gone may leave it in a
collective for ever. So the driver bounds every call, and asks silent hosts for a sign
of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import HostLostError, WorkerError

from .ray_job import Failure

_PING_EVERY_SECONDS = 1.0
_NOT_INSTALLED = "No module named 'autopar"
# JAX ends a process 5 s after another of its group fell silent: that one is the cause.
HUNG_SECONDS = 3.0
_GRACE_SECONDS = 1.0  # after a failure, for others to tell a better reason


@dataclass(frozen=True)
class Watch:
    """One call to some hosts.

    `ping` asks hosts for a sign of life and gives the answers to come, `name` is a host
    in words, `seconds` how long the call may take and `silent_seconds` how long a host
    may go without a sign of life. When another fails, a host that was silent for
    `hung_seconds` is the cause.
    """

    ray: Any
    method: str
    seconds: float
    silent_seconds: float
    ping: Callable[[Sequence[int]], Mapping[Any, int]]
    name: Callable[[int], str]
    hung_seconds: float = HUNG_SECONDS

    def gather(self, refs: Mapping[Any, int]) -> dict[int, Any]:
        """The answers by rank.

        Raises:
          HostLostError: a host died, fell silent, or did not answer in time.
          WorkerError: an exception on a host.
        """
        start = time.monotonic()
        alive = dict.fromkeys(refs.values(), start)
        pending, pings = dict(refs), {}
        replies: dict[int, Any] = {}
        while pending:
            ready, _ = self.ray.wait(
                [*pending, *pings], num_returns=1, timeout=_PING_EVERY_SECONDS
            )
            now = time.monotonic()
            for ref in ready:
                if ref in pings:
                    alive[pings.pop(ref)] = now
                    continue
                rank = pending.pop(ref)
                found = self._answer(ref, rank)
                if isinstance(found, WorkerError | HostLostError):
                    hung = [
                        (alive[each], each)
                        for each in pings.values()
                        if now - alive[each] > self.hung_seconds and each != rank
                    ]
                    cause = self._first_cause(found, pending)
                    if hung:
                        raise self._silent(now, *min(hung)) from cause
                    raise cause
                replies[rank] = found
            asked = set(pings.values())
            silent = [rank for rank in pending.values() if rank not in asked]
            if now - min((alive[r] for r in silent), default=now) > _PING_EVERY_SECONDS:
                pings.update(self.ping(silent))
            self._check_time(now, start, [(alive[r], r) for r in pending.values()])
        return replies

    def _answer(self, ref: Any, rank: int) -> Any:
        """What a host returned, or the error that tells why it did not."""
        name = self.name(rank)
        try:
            reply = self.ray.get(ref)
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            return self._failed(error, rank)
        if isinstance(reply, Failure):
            text = f"{name} raised in {self.method!r}: {reply.summary}"
            return WorkerError(text, rank, reply.traceback, reply.is_echo)
        return reply

    def _failed(self, error: Exception, rank: int) -> HostLostError | WorkerError:
        """What a failure of Ray itself means."""
        name = self.name(rank)
        if _NOT_INSTALLED in str(error):
            return WorkerError(
                f"Every host must have autopar, as the driver has, but {name} has not; "
                f"pip install 'autopar[ray]' there, where `ray start` runs.",
                rank,
            )
        is_lost = ConnectionError, TimeoutError, self.ray.exceptions.RayActorError
        if isinstance(error, is_lost):
            cause = str(error).strip().splitlines()[-1].strip()
            return HostLostError(
                f"Every host must live until its step is done, but {name} died in "
                f"{self.method!r}: {cause} Its arrays are gone; restore them from a "
                f"checkpoint and call again, which starts new workers.",
                rank,
            )
        return WorkerError(f"{name} failed in {self.method!r}: {error}", rank)

    def _first_cause(self, found: Exception, pending: Mapping[Any, int]) -> Exception:
        """Of failures that follow each other within a second, the one to tell."""
        failures = [found]
        end = time.monotonic() + _GRACE_SECONDS
        left = dict(pending)
        while left and (seconds := end - time.monotonic()) > 0:
            ready, _ = self.ray.wait(list(left), num_returns=1, timeout=seconds)
            for ref in ready:
                answer = self._answer(ref, left.pop(ref))
                if isinstance(answer, WorkerError | HostLostError):
                    failures.append(answer)

        def weight(failure: Exception) -> int:
            if isinstance(failure, HostLostError):
                return 0
            return 2 if getattr(failure, "is_echo", False) else 1

        return min(failures, key=weight)

    def _silent(self, now: float, last: float, rank: int) -> HostLostError:
        return HostLostError(
            f"Every host must answer while it works, but {self.name(rank)} "
            f"has been silent for {now - last:.0f} s in {self.method!r}. All "
            f"workers are ended; call again from a checkpoint.",
            rank,
        )

    def _check_time(
        self, now: float, start: float, alive: Sequence[tuple[float, int]]
    ) -> None:
        if not alive:
            return
        last, rank = min(alive)
        if now - last > self.silent_seconds:
            raise self._silent(now, last, rank)
        if now - start > self.seconds:
            names = ", ".join(self.name(rank) for _, rank in alive)
            raise HostLostError(
                f"A call must be done in {self.seconds:g} s, but in {self.method!r} "
                f"{names} is not. All workers are ended; pass a larger step_seconds to "
                f"Cluster.ray() if the step is that long.",
                rank,
            )
