"""Connections between the processes of a run: messages, and the driver's calls.

A call through Ray costs the driver about a millisecond of CPU time, one over a socket a
tenth of that. A host answers these calls in the order in which they were made.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from queue import SimpleQueue
from typing import Any

from .ray_job import Failure

Address = tuple[str, int]
_CONNECT_SECONDS = 10.0
_SMALL_BYTES = 1 << 16  # larger arrays are sent from where they lie


def accept(listener: Listener) -> Connection:
    """The next connection of somebody who knows the listener's secret."""
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # somebody else
        return _at_once(connection)


def dial(address: Address, secret: bytes) -> Connection:
    """A connection to whoever accepts some there.

    Raises:
      OSError: nobody can be reached there.
    """
    raw = socket.create_connection(address, _CONNECT_SECONDS)
    raw.settimeout(None)
    connection = Connection(raw.detach())
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    return _at_once(connection)


def _at_once(connection: Connection) -> Connection:
    """Small messages are not held back until the one before is acknowledged."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def answer_calls(listener: Listener, answer: Callable[..., Any]) -> None:
    """Answer the calls of the driver that connects next, on a thread.

    `answer` takes a method's name and its arguments, and raises nothing.
    """

    def serve() -> None:
        answers: SimpleQueue[Any] = SimpleQueue()
        with accept(listener) as connection, suppress(EOFError, OSError):
            # The driver may be sending its next call, and read no answer meanwhile.
            in_background(lambda: _send_answers(connection, answers))
            while True:
                method, arguments = receive(connection)
                answers.put(answer(method, arguments))

    in_background(serve)


def _send_answers(connection: Connection, answers: SimpleQueue[Any]) -> None:
    with connection, suppress(OSError):  # the driver is gone
        while True:
            send(connection, answers.get())


class Calls:
    """The driver's calls to one host, which answers them in their order.

    What comes after a call that failed fails as it did.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: deque[Future[Any]] = deque()
        self._is_over = False
        self._lock = threading.Lock()
        in_background(self._read_answers)

    def begin(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Send a call; its answer, or the ConnectionError that none comes.

        A frozen host may not take it: the heartbeat ends that, and the wait here.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._waiting.append(answer)
            is_over = self._is_over
        if is_over:
            self._end()
        with suppress(OSError):  # then the reading ends, too
            send(self._connection, (method, arguments))
        return answer

    def _read_answers(self) -> None:
        failure: Failure | None = None
        with self._connection, suppress(EOFError, OSError):
            while True:
                answer = receive(self._connection)
                if failure is None and isinstance(answer, Failure):
                    failure = answer
                self._waiting.popleft().set_result(failure or answer)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            waiting = [*self._waiting]
            self._waiting.clear()
        for answer in waiting:
            answer.set_exception(ConnectionError("its connection ended."))


def in_background(run: Callable[[], None]) -> None:
    """Start a thread that ends with the process."""
    threading.Thread(target=run, daemon=True).start()
