"""Calls over a connection: their order, their arrays, and ends that go away."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from autopar.errors import HostLostError
from autopar.runtime import ray_transport
from autopar.runtime.ray_job import Failure
from autopar.runtime.ray_transport import (
    Address,
    Answer,
    Calls,
    answer_calls,
    dial,
    receive,
    send,
    wait_for,
)
from autopar.runtime.ray_watch import Watch

SECRET = b"secret"


class Host:
    """A host that answers calls; `gate` holds back its answers."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.called: list[str] = []

        self.answered: Any = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.called.append(method)
        self.gate.wait(10)
        return self.answered or arguments


def serve(host: Host) -> Address:
    """Have a host answer; where it is reached."""
    listener = Listener(("127.0.0.1", 0))
    answer_calls(listener, SECRET, host.answer)
    return listener.address  # type: ignore[return-value]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def connection(host: Host) -> Iterator[Connection]:
    with dial(serve(host), SECRET) as made:
        yield made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (400, 500)])
def test_arrays_arrive_as_they_were(connection: Connection, dtype: str, shape: Any):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.random.default_rng(0).integers(0, 2, shape).astype(kind)
    send(connection, ("echo", (array, array.T, "text")))
    got, transposed, text = receive(connection)
    assert (got.dtype, got.shape, text) == (kind, shape, "text")
    np.testing.assert_array_equal(got, array)
    np.testing.assert_array_equal(transposed, array.T)


def test_calls_wait_in_their_order_for_one_another(connection: Connection, host: Host):
    host.gate.clear()
    for number in range(3):
        send(connection, (f"call {number}", (number,)))
    assert not connection.poll(0.2), "the first is not answered"
    assert host.called == ["call 0"]
    host.gate.set()
    assert [receive(connection) for _ in range(3)] == [(0,), (1,), (2,)]


def test_calls_and_answers_of_any_size_do_not_block_each_other(
    connection: Connection, host: Host
):
    """The driver sends a second call while the answer to the first fills the way."""
    large = np.ones(8 << 20, np.uint8)
    for _ in range(3):
        send(connection, ("echo", (large,)))
    for _ in range(3):
        np.testing.assert_array_equal(receive(connection)[0], large)


def test_who_does_not_know_the_secret_is_not_answered(host: Host):
    address = serve(host)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        dial(address, b"another")
    socket.create_connection(address).close()
    with dial(address, SECRET) as connection:  # the host waits for the right one
        send(connection, ("echo", (1,)))
        assert receive(connection) == (1,)


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(4)])
def test_a_stranger_does_not_keep_the_driver_out(
    host: Host, said: bytes, monkeypatch: pytest.MonkeyPatch
):
    """Ray looks for the processes that had a port before."""
    monkeypatch.setattr(ray_transport, "_STRANGER_SECONDS", 1.0)
    address = serve(host)
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        with dial(address, SECRET) as connection:
            send(connection, ("echo", (1,)))
            assert receive(connection) == (1,)


def test_a_host_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ray_transport, "_ANSWER_SECONDS", 0.2)
    with Listener(("127.0.0.1", 0)) as listener, pytest.raises(OSError):
        dial(listener.address, SECRET)  # type: ignore[arg-type]


def told(answer: Answer) -> Any:
    """What a host answers, waited for."""
    while not answer.done():
        wait_for([answer], 10)
    return answer.result()


@pytest.fixture
def calls(connection: Connection) -> Calls:
    return Calls(connection)


def test_a_call_is_answered_and_those_after_a_failed_one_fail_as_it(
    calls: Calls, host: Host
):
    assert told(calls.begin("echo", (1,))) == (1,)
    failure = Failure("step", "KeyError: 3", "")
    found = [calls.begin("echo", (failure,)), calls.begin("echo", (2,))]
    assert [told(each) for each in found] == [(failure,), (2,)]
    host.answered = failure
    failed = calls.begin("step", ())
    assert told(failed) == failure
    host.answered = None
    assert told(calls.begin("fetch", (7,))) == failure


def dying(text: str) -> Future[float]:
    """A sign of life that Ray knows cannot come."""
    found = Future[float]()
    found.set_exception(type("Died", (RayActorError,), {"__str__": lambda _: text})())
    return found


def alive() -> Future[float]:
    found = Future[float]()
    found.set_result(0.0)
    return found


@pytest.mark.parametrize(
    ("ping", "cause"),
    [
        (dying("the process was killed"), "the process was killed"),
        (alive(), "its connection ended"),
    ],
)
def test_a_connection_that_ends_is_a_lost_host(ping: Future[float], cause: str):
    ours, theirs = socket.socketpair()
    calls = Calls(Connection(ours.detach()))
    theirs.close()
    answer = calls.begin("step", ())
    watch = Watch(
        *("step", 60.0, 60.0), lambda _: 0.0, lambda _: ping, "host {}".format
    )
    with pytest.raises(
        HostLostError, match=rf"host 3 died in 'step': {cause}"
    ) as found:
        watch.gather({answer: 3})
    assert found.value.rank == 3
    with pytest.raises(ConnectionError):
        told(calls.begin("step", ()))
