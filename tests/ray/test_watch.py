"""What the driver makes of hosts that answer, fail, hang or are late."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from autopar.errors import HostLostError, WorkerError
from autopar.runtime.ray_job import Failure
from autopar.runtime.ray_watch import Watch


class Exceptions:
    """As `ray.exceptions`."""

    class RayError(Exception):
        """Any."""

    class RayActorError(RayError):
        """The actor is gone."""


@dataclass
class Answers:
    """As the part of `ray` that a watch uses: answers that come after some seconds."""

    after: dict[str, tuple[float, Any]]
    exceptions: type = Exceptions
    start: float = field(default_factory=time.monotonic)

    def wait(self, refs: Sequence[str], num_returns: int, timeout: float) -> Any:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            now = time.monotonic() - self.start
            ready = [ref for ref in refs if self.after[ref][0] <= now]
            if ready:
                return ready[:num_returns], []
            time.sleep(0.01)
        return [], list(refs)

    def get(self, ref: str) -> Any:
        found = self.after[ref][1]
        if isinstance(found, Exception):
            raise found
        return found


def watch(answers: Answers, silent: Sequence[int] = (), **limits: float) -> Watch:
    """A watch of hosts that answer pings at once, or never if they are `silent`."""
    numbers = iter(range(1000))

    def ping(ranks: Sequence[int]) -> Mapping[str, int]:
        refs = {f"ping {next(numbers)}": rank for rank in ranks}
        for ref, rank in refs.items():
            answers.after[ref] = 1e9 if rank in silent else 0.0, 0.0
        return refs

    waits = {"seconds": 60.0, "silent_seconds": 60.0, "hung_seconds": 3.0, **limits}
    name: Callable[[int], str] = "host {}".format
    return Watch(answers, "step", ping=ping, name=name, **waits)


def test_answers_come_back_by_rank():
    answers = Answers({"a": (0.1, "first"), "b": (0.0, "second")})
    assert watch(answers).gather({"a": 0, "b": 1}) == {0: "first", 1: "second"}


def test_a_host_without_autopar_is_told_what_to_install():
    text = "failed to import on the worker: No module named 'autopar'"
    answers = Answers({"a": (0, 1), "b": (0, Exceptions.RayError(text))})
    with pytest.raises(WorkerError, match=r"host 1 has not; pip install 'autopar") as e:
        watch(answers).gather({"a": 0, "b": 1})
    assert e.value.rank == 1


def test_a_dead_host_is_told_before_those_it_took_along():
    echo = Failure("PeerLost: group 1", "", is_echo=True)
    dead = Exceptions.RayActorError("worker died")
    answers = Answers({"a": (0, echo), "b": (0.2, dead)})
    with pytest.raises(HostLostError, match=r"host 1 died in 'step': worker died"):
        watch(answers).gather({"a": 0, "b": 1})


def test_a_silent_host_is_given_up_in_time():
    start = time.monotonic()
    with pytest.raises(HostLostError, match="host 0 has been silent for"):
        watch(Answers({"a": (60.0, 1)}), silent=[0], silent_seconds=1.5).gather(
            {"a": 0}
        )
    assert time.monotonic() - start < 10


def test_a_host_that_answers_pings_may_take_as_long_as_a_call_may():
    answers = Answers({"a": (2.5, "late")})
    assert watch(answers, silent_seconds=1.5).gather({"a": 0}) == {0: "late"}
    with pytest.raises(HostLostError, match=r"done in 1 s.*host 0 is not"):
        watch(Answers({"a": (60.0, 1)}), seconds=1.0).gather({"a": 0})


def test_a_hung_host_is_told_though_it_takes_another_along():
    dead = Exceptions.RayActorError("jax ended the process")
    answers = Answers({"a": (4.5, dead), "b": (60.0, 1)})
    with pytest.raises(HostLostError, match="host 1 has been silent for"):
        watch(answers, silent=[1]).gather({"a": 0, "b": 1})


def test_a_host_that_may_still_be_starting_is_not_the_cause():
    text = "failed to import on the worker: No module named 'autopar'"
    answers = Answers({"a": (1.5, Exceptions.RayError(text)), "b": (60.0, 1)})
    for hung_seconds, told in ((60.0, "host 0 has not"), (0.1, "host 1 has been sil")):
        answers.start = time.monotonic()
        with pytest.raises((WorkerError, HostLostError), match=told):
            watch(answers, silent=[1], hung_seconds=hung_seconds).gather(
                {"a": 0, "b": 1}
            )
