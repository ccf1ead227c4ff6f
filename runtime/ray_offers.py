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

Offer = dict[str, Any]
Kinds = Sequence[jax.ShapeDtypeStruct]
# Brings what is offered under a number, as arrays of given types.
Pull = Callable[[int, Kinds], list[jax.Array]]
_ENDS = EOFError, OSError, jax.errors.JaxRuntimeError  # of another host


class PeerLost(Exception):
    """The host at the other end is gone; its own failure is the cause."""


class Outgoing:
    """This host's offers to one other, kept until they are acknowledged.

    Arguments:
      connection: to the other host.
      peer: the rank of that host.
    """

    def __init__(self, connection: Connection, peer: int) -> None:
        self.connection, self.peer = connection, peer
        self._offered: dict[int, Sequence[jax.Array]] = {}
        self._one_message = threading.Lock()  # the lanes of a host send at once
        self._changed = threading.Condition()
        self._is_lost = False
        in_background(self._read_acknowledgements)

    def keep(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Keep what is offered under a number."""
        with self._changed:
            self._offered[number] = arrays

    def offered(self, number: int) -> Sequence[jax.Array]:
        """What is offered under a number, and not acknowledged yet."""
        with self._changed:
            return self._offered[number]

    def send(self, offer: Mapping[str, Any]) -> None:
        """Tell the other host of an offer.

        Raises:
          PeerLost: it is gone.
        """
        try:
            with self._one_message:
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
            offered = (id(array) for each in self._offered.values() for array in each)
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
      peer: the rank of that host.
      pull: brings what it offers.
      kinds_of: the types of what is to be brought as soon as it is offered; None where
        that waits until it is asked for.
    """

    def __init__(
        self,
        connection: Connection,
        peer: int,
        pull: Pull,
        kinds_of: Callable[[Offer], Kinds | None],
    ) -> None:
        self.connection, self.peer = connection, peer
        self._pull, self._kinds_of = pull, kinds_of
        self._offers: dict[
            tuple[int, int], deque[tuple[Offer, list[jax.Array] | None]]
        ] = {}
        self._changed = threading.Condition()
        self._end: Exception | None = None
        self._arriving: SimpleQueue[tuple[int, Sequence[jax.Array]]] = SimpleQueue()
        in_background(self._read_offers)
        in_background(self._acknowledge)

    def next_offer(
        self, source: int, target: int
    ) -> tuple[Offer, list[jax.Array] | None]:
        """What a stage there offers a stage here next, and its data if that is coming.

        Waits for the offer.

        Raises:
          PeerLost: the host is gone.
        """
        with self._changed:
            offers = self._offers.setdefault((source, target), deque())
            self._changed.wait_for(lambda: offers or self._end)
            if not offers and isinstance(self._end, _ENDS):
                raise _lost(self.peer, self._end) from self._end
            if not offers and self._end:
                raise self._end
            return offers.popleft()

    def pull(self, number: int, kinds: Kinds) -> list[jax.Array]:
        """Read an offer of arrays of these types; they may still be on their way."""
        arrays = self._pull(number, kinds)
        self._arriving.put((number, arrays))
        return arrays

    def _read_offers(self) -> None:
        try:
            while True:
                offer = json.loads(self.connection.recv_bytes())
                pair, kinds = (offer["source"], offer["target"]), self._kinds_of(offer)
                arrays = None if kinds is None else self.pull(offer["number"], kinds)
                with self._changed:
                    self._offers.setdefault(pair, deque()).append((offer, arrays))
                    self._changed.notify_all()
        except Exception as error:  # raised again where the offer is waited for
            with self._changed:
                self._end = error
                self._changed.notify_all()

    def _acknowledge(self) -> None:
        while True:
            number, arrays = self._arriving.get()
            try:
                jax.block_until_ready(arrays)
                self.connection.send_bytes(json.dumps(number).encode())
            except (jax.errors.JaxRuntimeError, OSError):
                return  # whoever uses the arrays meets the same error
            del arrays


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


def _lost(peer: int, end: Exception | None = None) -> PeerLost:
    if isinstance(end, jax.errors.JaxRuntimeError):
        return PeerLost(f"nothing comes from host {peer} any more: {end}")
    return PeerLost(f"host {peer} closed its connection")
