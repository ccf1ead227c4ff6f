"""Calls from the driver to a host over a connection of their own, one after the other.

A call through Ray costs the driver about a millisecond of CPU time, one over a socket a
tenth of that. A host answers these calls in the order in which they were made.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
    wait,
)
from queue import SimpleQueue
from typing import Any

from .ray_hosts import import_ray

Address = tuple[str, int]
_CONNECT_SECONDS = 10.0
_CAUSE_SECONDS = 5.0  # Ray knows within a second why a process ended
_SMALL_BYTES = 1 << 16  # larger arrays are sent from where they lie


def serve(address: str, secret: bytes, answer: Callable[..., Any]) -> Address:
    """Answer the calls of one driver on a thread; where it connects to.

    Arguments:
      address: of the network card that the driver reaches.
      secret: what only this driver knows.
      answer: takes a method's name and its arguments, and raises nothing.
    """
    listener = Listener((address, 0), authkey=secret)
    host, port = listener.address
    given = listener, answer
    threading.Thread(target=_serve, args=given, name="calls", daemon=True).start()
    return str(host), int(port)


def _serve(listener: Listener, answer: Callable[..., Any]) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with listener, _accepted(listener) as connection:
        # The driver may be sending its next call, and read no answer meanwhile.
        given = connection, answers
        threading.Thread(target=_send_answers, args=given, daemon=True).start()
        while True:
            try:
                method, arguments = receive(connection)
            except (EOFError, OSError):
                return  # the driver is gone, and Ray ends this process
            answers.put(answer(method, arguments))


def _send_answers(connection: Connection, answers: SimpleQueue[Any]) -> None:
    with connection:
        while True:
            try:
                send(connection, answers.get())
            except OSError:
                return  # the driver is gone


def _accepted(listener: Listener) -> Connection:
    """The first connection of somebody who knows the secret."""
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # somebody else
        send_at_once(connection)
        return connection


def dial(address: Address, secret: bytes) -> Connection:
    """The driver's end of the connection to a host.

    Raises:
      OSError: the host cannot be reached there.
    """
    raw = socket.create_connection(address, _CONNECT_SECONDS)
    raw.settimeout(None)
    connection = Connection(raw.detach())
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    send_at_once(connection)
    return connection


def send(connection: Connection, message: Any) -> None:
    """Send a message; large arrays are not copied."""
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _SMALL_BYTES:
            return True
        large.append(buffer)
        return False

    head = pickle.dumps(message, protocol=5, buffer_callback=is_small)
    connection.send_bytes(bytes([bool(large)]) + head)
    if large:
        connection.send_bytes(len(large).to_bytes(8, "little"))
        for buffer in large:
            connection.send_bytes(buffer.raw())


def receive(connection: Connection) -> Any:
    """The next message.

    Raises:
      EOFError, OSError: the other end is gone.
    """
    head = connection.recv_bytes()
    if not head[0]:
        return pickle.loads(memoryview(head)[1:])
    number = int.from_bytes(connection.recv_bytes(), "little")
    large = [connection.recv_bytes() for _ in range(number)]
    return pickle.loads(memoryview(head)[1:], buffers=large)


class DirectAnswers:
    """Answers that come over connections, for a `Watch`: as the part of `ray` it uses.

    What is waited for are connections, and signs of life that come through Ray.

    Arguments:
      ping: the reference to a sign of life of a host.
      rank_of: the host at the other end of a connection.
    """

    def __init__(
        self, ping: Callable[[int], Any], rank_of: Mapping[Connection, int]
    ) -> None:
        self._ray = import_ray()
        self._ping, self._rank_of = ping, rank_of
        self.exceptions = self._ray.exceptions

    def send(self, connection: Connection, message: Any) -> None:
        """Send a call; where that fails, `get` finds out why.

        A frozen host may not take it: the heartbeat ends that, and the wait here.
        """
        with suppress(OSError):
            send(connection, message)

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        """All that have come, after `timeout` seconds at most, and an empty list."""
        connections = [ref for ref in refs if isinstance(ref, Connection)]
        pings = [ref for ref in refs if not isinstance(ref, Connection)]
        ready: list[Any] = list(wait(connections, timeout))
        if pings:
            ready += self._ray.wait(pings, num_returns=len(pings), timeout=0)[0]
        return ready, []

    def get(self, ref: Any) -> Any:
        """What came.

        Raises:
          ray.exceptions.RayError: the host ended; says why.
          ConnectionError: its connection ended, and it did not.
        """
        if not isinstance(ref, Connection):
            return self._ray.get(ref)
        try:
            return receive(ref)
        except (EOFError, OSError) as error:
            ping = self._ping(self._rank_of[ref])
            self._ray.get(ping, timeout=_CAUSE_SECONDS)
            raise ConnectionError("its connection ended.") from error


def send_at_once(connection: Connection) -> None:
    """Small messages are not held back until the one before is acknowledged."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
