"""What the driver makes of hosts that answer, fail, hang or are late."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError

from autopar.errors import HostLostError, WorkerError
from autopar.runtime.ray_job import Failure
from autopar.runtime.ray_watch import Heartbeat, Watch


class Died(RayActorError):
    """As Ray tells of a process that ended."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def after(seconds: float, found: Any) -> Future[Any]:
    """An answer, or an error, that comes after some seconds."""
    answer = Future[Any]()
    is_error = isinstance(found, Exception)
    come = answer.set_exception if is_error else answer.set_result
    timer = threading.Timer(seconds, come, (found,))
    timer.daemon = True
    timer.start()
    return answer


def gathered(
    answers: Sequence[tuple[float, Any]], silent: Sequence[int] = (), **limits: float
) -> Mapping[int, Any]:
    """What comes of hosts, by rank, of which some give no sign of life."""
    start = time.monotonic()

    def silent_seconds(rank: int) -> float:
        return time.monotonic() - start if rank in silent else 0.0

    waits = {"seconds": 60.0, "silent_seconds": 60.0, **limits}
    watch = Watch(
        "step",
        silent=silent_seconds,
        ping=lambda _: after(0.0, 0.0),
        name="host {}".format,
        **waits,
    )
    return watch.gather({after(*each): rank for rank, each in enumerate(answers)})


def test_answers_come_back_by_rank():
    assert gathered([(0.1, "first"), (0, "second")]) == {0: "first", 1: "second"}


def test_a_host_without_autopar_is_told_what_to_install():
    error = RayError("failed to import on the worker: No module named 'autopar'")
    with pytest.raises(WorkerError, match=r"host 1 has not; pip install 'autopar") as e:
        gathered([(0, 1), (0, error)])
    assert e.value.rank == 1


def test_a_failure_is_told_with_the_call_that_failed():
    failed = Failure("load", "ValueError: no", "Traceback ...")
    with pytest.raises(WorkerError, match="host 0 raised in 'load': ValueError: no"):
        gathered([(0, failed)])


def test_a_dead_host_is_told_before_those_it_took_along():
    echo = Failure("step", "PeerLost: group 1", "", is_echo=True)
    with pytest.raises(HostLostError, match=r"host 1 died in 'step': worker died"):
        gathered([(0, echo), (0.2, Died("worker died"))])


def test_a_silent_host_is_given_up_in_time():
    start = time.monotonic()
    with pytest.raises(HostLostError, match="host 0 has been silent for"):
        gathered([(60.0, 1)], silent=[0], silent_seconds=1.5)
    assert time.monotonic() - start < 10


def test_a_host_that_answers_pings_may_take_as_long_as_a_call_may():
    assert gathered([(2.5, "late")], silent_seconds=1.5) == {0: "late"}
    with pytest.raises(HostLostError, match=r"done in 1 s.*host 0 is not"):
        gathered([(60.0, 1)], seconds=1.0)


def test_a_hung_host_is_told_though_it_takes_another_along():
    with pytest.raises(HostLostError, match="host 1 has been silent for"):
        gathered([(4.5, Died("jax ended the process")), (60.0, 1)], silent=[1])


class Workers:
    """Hosts that answer signs of life, but for those that are said not to."""

    def __init__(self, signs: Mapping[int, Any]) -> None:
        self.lost: str | None = None
        self.lost_rank: int | None = None
        self._signs = signs
        self.is_over = threading.Event()

    def name(self, rank: int) -> str:
        return f"host {rank}"

    def ping(self, rank: int) -> Future[Any]:
        return after(*self._signs.get(rank, (0.0, 0.0)))

    def lose(self, rank: int, reason: str) -> None:
        self.lost, self.lost_rank = reason, rank
        self.is_over.set()


@pytest.mark.parametrize(
    ("signs", "rank", "told"),
    [
        ({1: (0.0, Died("it was killed"))}, 1, "host 1 died: it was killed"),
        ({0: (60.0, 0.0)}, 0, "host 0 has been silent for 1.5 s"),
    ],
    ids=["dead", "silent"],
)
def test_a_host_is_lost_while_no_call_is_under_way(
    signs: Mapping[int, Any], rank: int, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    workers = Workers(signs)
    heartbeat = Heartbeat(workers, 2, silent_seconds=1.5)
    assert workers.is_over.wait(20)
    assert workers.lost_rank == rank and told in (workers.lost or "")
    heartbeat.stop()
