"""Send arrays between host groups that share no JAX process group.

For each pair of hosts that exchange values there is a control connection: the sender
offers (which value, under which number, in which tiles), the receiver checks that the
tiles are those it expects, pulls them from the sender's transfer server and
acknowledges. The checks matter: a pull into other tiles delivers wrong data silently.
An offer is pulled exactly once, and its buffers are neither donated nor freed before it
is acknowledged.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any

import jax
from jax.experimental import transfer

from autopar.lowering.exported_program import ShardedType

from .instructions import Value
from .ray_programs import sharding_of
from .transfer_plan import plan_between_hosts
from .transfers import Transfer

NUM_STREAMS = 4  # one stream carries 0.3-0.85 GB/s, four 2 GB/s
TRANSFER_BYTES = 4 << 20
Address = tuple[str, int]
_Transfers = dict[tuple[str, int], tuple[ShardedType, Transfer]]


class PeerLost(Exception):
    """The host at the other end is gone; its own failure is the cause."""


class Transport:
    """The transfer server of one host, and its control connections.

    Arguments:
      address: of the network card that other hosts reach.
      secret: what only hosts of the same run know.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._server = transfer.start_transfer_server(
            jax.devices()[0].client,
            f"{address}:0",
            [f"{address}:0"] * NUM_STREAMS,
            transfer_size=TRANSFER_BYTES,
        )
        self._listener = Listener((address, 0), authkey=secret)
        self._offers = itertools.count(1)
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        self._jobs: dict[int, _Transfers] = {}
        self._transfers: _Transfers = {}

    @property
    def control_address(self) -> Address:
        """Where other hosts connect to."""
        host, port = self._listener.address
        return str(host), int(port)

    def connect(self, group: int, peers: Mapping[int, Address]) -> None:
        """Open a connection to one host of every other group, and take theirs."""
        accepted = threading.Thread(target=self._accept, args=(len(peers),))
        accepted.start()
        for peer, address in sorted(peers.items()):
            connection = Client(address, authkey=self._secret)
            connection.send_bytes(
                json.dumps({"group": group, "server": self._server.address()}).encode()
            )
            self._out[peer] = _Outgoing(connection, peer)
        accepted.join()

    def _accept(self, count: int) -> None:
        for _ in range(count):
            connection = self._listener.accept()
            hello = json.loads(connection.recv_bytes())
            pull = self._server.connect(hello["server"])
            self._in[hello["group"]] = _Incoming(connection, pull, hello["group"])

    def plan(
        self,
        job: int,
        crossing: Mapping[tuple[str, int], tuple[ShardedType, ShardedType]],
    ) -> None:
        """Plan the transfers of a job: a slot's type at home and where it is read."""
        self._jobs[job] = {key: _plan(*types) for key, types in crossing.items()}

    def use(self, job: int) -> None:
        """Make the transfers of this job from now on."""
        self._transfers = self._jobs.get(job, {})

    def send(
        self, value: Value, source: int, target: int, group: int, array: jax.Array
    ) -> None:
        """Offer a value to a stage of another group; waits for nobody."""
        wire, transfer_ = self._transfers[value.slot, target]
        packed = transfer_.pack(array)
        packed = packed[0] if isinstance(packed, list) else packed
        number = next(self._offers)
        outgoing = self._out[group]
        outgoing.keep(number, packed)
        self._server.await_pull(number, [packed])
        outgoing.send(
            {
                "number": number,
                "value": str(value),
                "source": source,
                "target": target,
                "tiles": str(wire),
            }
        )

    def receive(self, value: Value, source: int, target: int, group: int) -> jax.Array:
        """The next value that a stage of another group offers.

        Raises:
          PeerLost: that host is gone.
          ValueError: it offers something else, or in other tiles.
        """
        offer = self._in[group].next_offer(source, target)
        wire, transfer_ = self._transfers[value.slot, target]
        expected = {"value": str(value), "tiles": str(wire)}
        if any(offer[key] != found for key, found in expected.items()):
            raise ValueError(
                f"what is pulled has the tiles that were offered, or its data would be "
                f"wrong, but stage {source} offers {offer} and {expected} is due; the "
                f"two hosts run different jobs, which is a bug."
            )
        landed = self._in[group].pull(offer["number"], transfer_.landing())
        parts = transfer_.plan.num_parts
        return transfer_.receive([landed] if parts else landed)

    def wait_for_readers(self, arrays: Sequence[Any] | None = None) -> None:
        """Until nobody reads these arrays any more, or any that was offered.

        Raises:
          PeerLost: a reader is gone.
        """
        for outgoing in self._out.values():
            outgoing.wait_for_readers(arrays)

    def close(self) -> None:
        """Close all connections, which wakes who waits at their other ends."""
        self._listener.close()
        for end in (*self._out.values(), *self._in.values()):
            _hang_up(end.connection)


class _Outgoing:
    """This host's offers to one other, kept until they are acknowledged."""

    def __init__(self, connection: Connection, peer: int) -> None:
        self.connection, self.peer = connection, peer
        self._offered: dict[int, jax.Array] = {}
        self._changed = threading.Condition()
        self._is_lost = False
        _in_background(self._read_acknowledgements)

    def keep(self, number: int, array: jax.Array) -> None:
        with self._changed:
            self._offered[number] = array

    def send(self, offer: Mapping[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(offer).encode())
        except OSError as error:
            raise _lost(self.peer) from error

    def wait_for_readers(self, arrays: Sequence[Any] | None) -> None:
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


class _Incoming:
    """What one other host offers; acknowledges each offer when its data is here."""

    def __init__(self, connection: Connection, pull_from: Any, peer: int) -> None:
        self.connection, self.peer = connection, peer
        self._pull_from = pull_from
        self._offers: dict[tuple[int, int], deque[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._is_lost = False
        self._arriving: SimpleQueue[tuple[int, jax.Array]] = SimpleQueue()
        _in_background(self._read_offers)
        _in_background(self._acknowledge)

    def next_offer(self, source: int, target: int) -> dict[str, Any]:
        with self._changed:
            offers = self._offers.setdefault((source, target), deque())
            self._changed.wait_for(lambda: offers or self._is_lost)
            if not offers:
                raise _lost(self.peer)
            return offers.popleft()

    def pull(self, number: int, landing: jax.ShapeDtypeStruct) -> jax.Array:
        (array,) = self._pull_from.pull(number, [landing])
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


def _plan(source: ShardedType, target: ShardedType) -> tuple[ShardedType, Transfer]:
    """A transfer, and what crosses in it as both sides print it."""
    plan = plan_between_hosts(
        source.shape, jax.numpy.dtype(source.dtype), *map(sharding_of, (source, target))
    )
    transfer_ = Transfer(plan)
    landing = transfer_.landing()
    assert isinstance(landing.sharding, jax.sharding.NamedSharding)
    return ShardedType.of(landing.shape, landing.dtype, landing.sharding), transfer_


def _hang_up(connection: Connection) -> None:
    """Close both directions; `close` alone waits for this side's reading thread."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end was first


def _in_background(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True).start()


def _lost(peer: int) -> PeerLost:
    return PeerLost(f"the host of group {peer} closed its connection")
