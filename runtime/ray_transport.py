"""Send arrays between host groups that share no JAX process group.

For each pair of hosts that exchange values there is a control connection: the sender
offers (which value, under which number, in which tiles), the receiver checks that the
tiles are those it expects, pulls them from the sender's transfer server, before they
are asked for, and acknowledges. The checks matter: a pull into other tiles delivers
wrong data silently.

When two hosts connect, the receiver pulls a few numbers first. Where that fails, what
the two exchange goes through Ray's object store, and with it through the memory of both
hosts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Listener
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .instructions import Value
from .ray_channel import Address, send_at_once
from .ray_crossing import Crossing
from .ray_offers import (
    Incoming,
    Kinds,
    Offer,
    Outgoing,
    Pull,
    hang_up,
    in_background,
)
from .ray_programs import from_local_parts, local_parts
from .ray_transfers import HostTransfer, host_transfer

NUM_STREAMS = 4  # one stream carries 0.3-0.85 GB/s, four 2 GB/s
TRANSFER_BYTES = 4 << 20
_PROBE = np.arange(8, dtype=np.int32)
_PROBE_SECONDS = 5.0  # a pull from a server that is not there waits for ever
_Transfers = dict[tuple[str, int], HostTransfer]
_Parts = list[list[np.ndarray]]  # of each array, on each device of the host


@dataclass(frozen=True)
class Peer:
    """Another host, and another way to what it offers.

    `read` brings the parts of this host of an offer, by its number.
    """

    address: Address
    read: Callable[[int], _Parts]


class Transport:
    """The transfer server of one host, and its control connections.

    Arguments:
      address: of the network card that other hosts reach.
      secret: what only hosts of the same run know.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._server, self._no_server = _started(address)
        self._listener = Listener((address, 0), authkey=secret)
        self._offers = itertools.count(1)
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._rank = 0
        self._is_direct: dict[int, bool] = {}
        self._jobs: dict[int, _Transfers] = {}
        self._job, self._transfers = 0, _Transfers()

    @property
    def control_address(self) -> Address:
        """Where other hosts connect to."""
        host, port = self._listener.address
        return str(host), int(port)

    def connect(self, rank: int, peers: Mapping[int, Peer]) -> dict[int, str]:
        """Open a connection to each of some hosts, by their ranks, and take theirs.

        Returns why nothing can be pulled from the server of some of these.
        """
        self._rank = rank
        with ThreadPoolExecutor(1, "accept") as thread:
            accepted = thread.submit(self._accept, peers)
            for peer, other in sorted(peers.items()):
                connection = Client(other.address, authkey=self._secret)
                send_at_once(connection)
                connection.send_bytes(json.dumps(self._hello()).encode())
                self._is_direct[peer] = bool(json.loads(connection.recv_bytes()))
                self._out[peer] = Outgoing(connection, peer)
            return accepted.result()

    def _hello(self) -> dict[str, Any]:
        """What another host is told at first, and may pull."""
        server, number = self._server, next(self._offers)
        if server is None:
            return {"rank": self._rank, "problem": self._no_server}
        server.await_pull(number, [jax.device_put(_PROBE, jax.local_devices()[0])])
        return {"rank": self._rank, "server": server.address(), "number": number}

    def _accept(self, peers: Mapping[int, Peer]) -> dict[int, str]:
        problems: dict[int, str] = {}
        for _ in peers:
            connection = self._listener.accept()
            send_at_once(connection)
            hello = json.loads(connection.recv_bytes())
            peer, server = hello["rank"], None
            problem = hello.get("problem") or self._no_server
            if not problem:
                given = hello["server"], hello["number"]
                server, problem = _probed(self._server, *given)
            if problem:
                problems[peer] = problem
            connection.send_bytes(json.dumps(not problem).encode())
            pull = _pulling(server) if server else _reading(peers[peer].read)
            kinds_of = partial(self._kinds_of, peer) if server else _is_asked_for
            self._in[peer] = Incoming(connection, peer, pull, kinds_of)
        return problems

    def plan(self, job: int, crossing: Mapping[tuple[str, int], Crossing]) -> None:
        """Plan the transfers of a job, by slot and the stage that reads it."""
        self._jobs[job] = {
            key: host_transfer(each, self._rank)
            for key, each in crossing.items()
            if not each.is_inside
        }

    def use(self, job: int) -> None:
        """Make the transfers of this job from now on."""
        self._job, self._transfers = job, self._jobs.get(job, {})

    def send(self, value: Value, source: int, target: int, array: jax.Array) -> None:
        """Offer a value to a stage on other hosts; waits for nobody."""
        transfer = self._transfers[value.slot, target]
        for peer, arrays in transfer.offers(array).items():
            number = next(self._offers)
            outgoing = self._out[peer]
            outgoing.keep(number, arrays)
            if self._is_direct[peer]:
                self._server.await_pull(number, arrays)
            outgoing.send(
                {
                    "number": number,
                    "job": self._job,
                    "value": str(value),
                    "source": source,
                    "target": target,
                    "tiles": transfer.tiles,
                }
            )

    def offered_parts(self, peer: int, number: int) -> _Parts:
        """This host's parts of what it offers another host."""
        return [local_parts(array) for array in self._out[peer].offered(number)]

    def receive(self, value: Value, source: int, target: int) -> jax.Array:
        """The next value that a stage on other hosts offers.

        Raises:
          PeerLost: one of those hosts is gone.
          ValueError: it offers something else, or in other tiles.
        """
        transfer = self._transfers[value.slot, target]
        expected = {"value": str(value), "tiles": transfer.tiles}
        landed: dict[int, list[jax.Array]] = {}
        for peer, kinds in transfer.landings.items():
            offer, arrays = self._in[peer].next_offer(source, target)
            if any(offer[key] != found for key, found in expected.items()):
                raise ValueError(
                    f"what is pulled has the tiles that were offered, or its data "
                    f"would be wrong, but stage {source} offers {offer} and {expected} "
                    f"is due; the hosts run different jobs, which is a bug."
                )
            if arrays is None:
                arrays = self._in[peer].pull(offer["number"], kinds)
            landed[peer] = arrays
        return transfer.receive(landed)

    def _kinds_of(self, peer: int, offer: Offer) -> Kinds | None:
        """What an offer lands as, if a job that is loaded here expects its tiles."""
        slot = Value.parse(offer["value"]).slot
        transfer = self._jobs.get(offer["job"], {}).get((slot, offer["target"]))
        if transfer is None or transfer.tiles != offer["tiles"]:
            return None
        return transfer.landings.get(peer)

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
            hang_up(end.connection)


def _started(address: str) -> tuple[Any, str]:
    """The transfer server of this host, or why there is none."""
    try:
        from jax.experimental import transfer

        server = transfer.start_transfer_server(
            jax.local_devices()[0].client,
            f"{address}:0",
            [f"{address}:0"] * NUM_STREAMS,
            transfer_size=TRANSFER_BYTES,
        )
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"no transfer server starts there ({error})"
    return server, ""


def _probed(own: Any, address: str, number: int) -> tuple[Any, str]:
    """The connection to another host's server, or why nothing comes over it."""
    outcome: SimpleQueue[tuple[Any, str]] = SimpleQueue()

    def pull() -> None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        kind = jax.ShapeDtypeStruct(_PROBE.shape, _PROBE.dtype, sharding=device)
        try:
            connection = own.connect(address)
            (found,) = connection.pull(number, [kind])
            is_good = np.array_equal(found, _PROBE)
        except Exception as error:
            outcome.put((None, f"{type(error).__name__}: {error}"))
            return
        problem = "" if is_good else "other numbers come than were sent"
        outcome.put((connection if is_good else None, problem))

    in_background(pull)
    try:
        return outcome.get(timeout=_PROBE_SECONDS)
    except Empty:
        return None, f"nothing comes from {address} in {_PROBE_SECONDS:g} s"


def _is_asked_for(_: Offer) -> None:
    """Nothing is brought before: it would go through this host's memory."""


def _pulling(server: Any) -> Pull:
    """Reads offers from another host's transfer server."""
    return lambda number, kinds: server.pull(number, [*kinds])


def _reading(read: Callable[[int], _Parts]) -> Pull:
    """Reads offers through the memory of the hosts."""
    return lambda number, kinds: [
        from_local_parts(parts, kind.shape, kind.sharding)
        for parts, kind in zip(read(number), kinds, strict=True)
    ]
