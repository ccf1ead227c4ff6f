"""A sign of life from every host each second, also while no call is under way.

So a host that is lost while the driver plans is told at once, in the log, and the next
call raises instead of waiting for it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from .ray_hosts import import_ray
from .ray_watch import HUNG_SECONDS

_EVERY_SECONDS = 1.0
_STOP_SECONDS = 5.0
_HUNG = int(HUNG_SECONDS / _EVERY_SECONDS)


class Watched(Protocol):
    """The workers, as what watches them sees them."""

    lost: str | None

    def name(self, rank: int) -> str: ...
    def lose(self, rank: int, reason: str) -> None: ...


def start_heartbeat(
    workers: Watched, actors: Sequence[Any], silent_seconds: float
) -> Callable[[], None]:
    """Watch workers until they are lost or collected, or what is returned is called.

    Ray ends a process that uses it after it has left the cluster: stop this before.
    """
    is_stopped = threading.Event()
    given = weakref.ref(workers), tuple(actors), silent_seconds, is_stopped
    beating = threading.Thread(
        target=_beat, args=given, name="autopar heartbeat", daemon=True
    )
    beating.start()

    def stop() -> None:
        is_stopped.set()
        if threading.current_thread() is not beating:
            beating.join(_STOP_SECONDS)

    return stop


def _beat(
    owner: weakref.ref[Watched],
    actors: Sequence[Any],
    silent_seconds: float,
    is_stopped: threading.Event,
) -> None:
    ray = import_ray()
    pings: dict[Future[Any], int] = {}
    # Beats are counted and not seconds: this process itself may stand still.
    unanswered: Counter[int] = Counter()
    while not is_stopped.wait(_EVERY_SECONDS):
        workers = owner()
        if workers is None or workers.lost is not None or not ray.is_initialized():
            return
        for ping in [each for each in pings if each.done()]:
            rank = pings.pop(ping)
            if (error := ping.exception()) is not None:
                hung = [each for each, beats in unanswered.items() if beats >= _HUNG]
                cause = str(error).strip().splitlines()[-1].strip()
                reason = f"{workers.name(rank)} died: {cause}"
                if hung:
                    reason = f"{workers.name(hung[0])} has been silent; {reason}"
                workers.lose(hung[0] if hung else rank, reason)
                return
            unanswered[rank] = 0
        unanswered.update(pings.values())
        for rank, beats in unanswered.items():
            if beats * _EVERY_SECONDS > silent_seconds:
                silent = f"has been silent for {silent_seconds:g} s."
                workers.lose(rank, f"{workers.name(rank)} {silent}")
                return
        asked = set(pings.values())
        try:
            for rank in set(range(len(actors))) - asked:
                # Not ray.wait: it would start a cluster if this one was left just now.
                pings[actors[rank].ping.remote().future()] = rank
        except (RuntimeError, ray.exceptions.RayError):
            return  # this process has left the cluster
        del workers
