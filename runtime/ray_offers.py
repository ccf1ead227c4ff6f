"""What one host offers another, over their control connection.

An offer is read exactly once. What was offered is neither donated nor freed before its
reader has acknowledged it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import jax


class PeerLost(Exception):
    """The host at the other end is gone; its own failure is the cause."""


class Outgoing:
    """This host's offers to one other, kept until they are acknowledged.

    Arguments:
      connection: to the other host.
      peer: the group of that host.
    """

    def __init__(self, connection: Connection, peer: int) -> None:
        self.connection, self.peer = connection, peer
        self._offered: dict[int, jax.Array] = {}
        self._changed = threading.Condition()
        self._is_lost = False
        in_background(self._read_acknowledgements)

    def keep(self, number: int, array: jax.Array) -> None:
        """Keep what is offered under a number."""
        with self._changed:
            self._offered[number] = array

    def offered(self, number: int) -> jax.Array:
        """What is offered under a number, and not acknowledged yet."""
        with self._changed:
            return self._offered[number]

    def send(self, offer: Mapping[str, Any]) -> None:
        """Tell the other host of an offer.

        Raises:
          PeerLost: it is gone.
        """
        try:
            self.connection.send_bytes(json.dumps(offer).encode())
        except OSError as error:
            raise _lost(self.peer) from error

    def wait_for_readers(self, arrays: Sequence[Any] | None) -> None:
        """Until none of these arrays is offered any more, or no array at all.

        Raises:
          PeerLost: the reader is gone.
        """
        wanted = None if arrays is None else {id(array) for array in arrays}

        def is_read() -> bool:
            offered = map(id, self._offered.values())
            return not any(wanted is None or each in wanted for each in offered)

        with self._changed:
            self._changed.wait_for(lambda: is_read() or self._is_lost)
            if not is_read():
                raise _lost(self.peer)

    def _read_acknowledgements(self) -> None:
        try:
            while True:
                number = json.loads(self.connection.recv_bytes())
                with self._changed:
                    del self._offered[number]
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._is_lost = True
                self._changed.notify_all()


class Incoming:
    """What one other host offers; acknowledges each offer when its data is here.

    Arguments:
      connection: to the other host.
      peer: the group of that host.
      pull: brings what is offered under a number, as an array of a given type.
    """

    def __init__(
        self,
        connection: Connection,
        peer: int,
        pull: Callable[[int, jax.ShapeDtypeStruct], jax.Array],
    ) -> None:
        self.connection, self.peer = connection, peer
        self._pull = pull
        self._offers: dict[tuple[int, int], deque[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._is_lost = False
        self._arriving: SimpleQueue[tuple[int, jax.Array]] = SimpleQueue()
        in_background(self._read_offers)
        in_background(self._acknowledge)

    def next_offer(self, source: int, target: int) -> dict[str, Any]:
        """What a stage there offers a stage here next; waits for it.

        Raises:
          PeerLost: the host is gone.
        """
        with self._changed:
            offers = self._offers.setdefault((source, target), deque())
            self._changed.wait_for(lambda: offers or self._is_lost)
            if not offers:
                raise _lost(self.peer)
            return offers.popleft()

    def pull(self, number: int, landing: jax.ShapeDtypeStruct) -> jax.Array:
        """Read an offer; the array may still be on its way."""
        array = self._pull(number, landing)
        self._arriving.put((number, array))
        return array

    def _read_offers(self) -> None:
        try:
            while True:
                offer = json.loads(self.connection.recv_bytes())
                pair = offer["source"], offer["target"]
                with self._changed:
                    self._offers.setdefault(pair, deque()).append(offer)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._is_lost = True
                self._changed.notify_all()

    def _acknowledge(self) -> None:
        while True:
            number, array = self._arriving.get()
            try:
                array.block_until_ready()
                self.connection.send_bytes(json.dumps(number).encode())
            except (jax.errors.JaxRuntimeError, OSError):
                return  # whoever uses the array meets the same error
            del array


def hang_up(connection: Connection) -> None:
    """Close both directions; `close` alone waits for this side's reading thread."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end was first


def in_background(run: Callable[[], None]) -> None:
    """Start a thread that ends with the process."""
    threading.Thread(target=run, daemon=True).start()


def _lost(peer: int) -> PeerLost:
    return PeerLost(f"the host of group {peer} closed its connection")
