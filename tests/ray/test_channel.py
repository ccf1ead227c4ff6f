"""Calls over a connection: their order, their arrays, and ends that go away."""

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from autopar.errors import HostLostError
from autopar.runtime.ray_channel import DirectAnswers, dial, receive, send, serve
from autopar.runtime.ray_watch import Watch

SECRET = b"secret"


class Host:
    """A host that answers calls; `gate` holds back its answers."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.called: list[str] = []

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.called.append(method)
        self.gate.wait(10)
        return arguments


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def connection(host: Host) -> Iterator[Connection]:
    with dial(serve("127.0.0.1", SECRET, host.answer), SECRET) as made:
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
    address = serve("127.0.0.1", SECRET, host.answer)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        dial(address, b"another")
    socket.create_connection(address).close()
    with dial(address, SECRET) as connection:  # the host waits for the right one
        send(connection, ("echo", (1,)))
        assert receive(connection) == (1,)


class RayError(Exception):
    """As `ray.exceptions.RayError`."""


class RayActorError(RayError):
    """As `ray.exceptions.RayActorError`."""


class Ray:
    """The part of `ray` that answers for hosts: of each whether it died."""

    class exceptions:
        """As `ray.exceptions`."""

        RayError, RayActorError = RayError, RayActorError

    def __init__(self, has_died: bool) -> None:
        self.has_died = has_died

    def get(self, ref: Any, timeout: float) -> float:
        if self.has_died:
            raise RayActorError("the process was killed")
        return 0.0


@pytest.mark.parametrize(
    ("has_died", "cause"),
    [(True, "the process was killed"), (False, "its connection ended")],
)
def test_a_connection_that_ends_is_a_lost_host(
    has_died: bool, cause: str, monkeypatch: pytest.MonkeyPatch
):
    from autopar.runtime import ray_channel

    monkeypatch.setattr(ray_channel, "import_ray", lambda: Ray(has_died))
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    answers = DirectAnswers(lambda rank: f"ping {rank}", {connection: 3})
    theirs.close()
    answers.send(connection, ("step", ()))  # why that fails is found out below
    watch = Watch(answers, "step", 60.0, 60.0, lambda _: {}, "host {}".format)
    with pytest.raises(
        HostLostError, match=rf"host 3 died in 'step': {cause}"
    ) as found:
        watch.gather({connection: 3})
    assert found.value.rank == 3
