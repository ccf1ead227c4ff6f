"""How the processes of a run reach each other: messages, calls, and arrays.

The driver has a connection to each host: through Ray a call costs it about a
millisecond of CPU time, over a socket a tenth of that.

Two hosts of different groups, which share no JAX process group, have one, too: the
sender offers (which value, under which number, in which tiles), the receiver checks
that the tiles are those it expects, pulls them from the sender's transfer server,
before they are asked for, and acknowledges. The checks matter: a pull into other tiles
delivers wrong data silently. When they connect, each pulls a few numbers first. Where
that fails, what it reads goes through Ray's object store, and the memory of both hosts.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
    wait,
)
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .instructions import Value
from .ray_job import Crossing, Failure
from .ray_programs import from_local_parts, local_parts
from .ray_transfers import HostTransfer, host_transfer

Address = tuple[str, int]
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0  # for a host that connects to others first
_STRANGER_SECONDS = 20.0  # for somebody who connects, and says nothing
_SMALL_BYTES = 1 << 16  # larger arrays are sent from where they lie
NUM_STREAMS = 4  # one stream carries 0.3-0.85 GB/s, four 2 GB/s
TRANSFER_BYTES = 4 << 20
_PROBE = np.arange(8, dtype=np.int32)
_PROBE_SECONDS = 5.0  # a pull from a server that is not there waits for ever
_MOST_WAITING = 64  # connections that are not accepted yet
_ENDS = EOFError, OSError, jax.errors.JaxRuntimeError  # of another host
_Transfers = dict[tuple[str, int], HostTransfer]
_Parts = list[list[np.ndarray]]  # of each array, on each device of the host
_Kinds = Sequence[jax.ShapeDtypeStruct]


def accept(listener: Listener, secret: bytes) -> Connection:
    """The next connection of somebody who knows the secret.

    Others may come by, as Ray looks for a process whose port this was.
    """
    while True:
        connection = listener.accept()
        with suppress(AuthenticationError, EOFError, OSError):
            with _handshake(connection, _STRANGER_SECONDS):
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
            return connection
        connection.close()


def dial(address: Address, secret: bytes) -> Connection:
    """A connection to whoever accepts some there.

    Raises:
      AuthenticationError: it has another secret.
      OSError: nobody can be reached there, or nobody answers.
    """
    raw = socket.create_connection(address, _CONNECT_SECONDS)
    raw.settimeout(None)
    connection = Connection(raw.detach())
    try:
        with _handshake(connection, _ANSWER_SECONDS):
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
    except EOFError as error:
        raise ConnectionError(f"{address} closed the connection.") from error
    return connection


@contextmanager
def _handshake(connection: Connection, seconds: float) -> Iterator[None]:
    """What is read inside comes within so many seconds, or raises an OSError.

    From then on small messages are not held back until the one before is acknowledged.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        yield
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


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


def answer_calls(listener: Listener, secret: bytes, answer: Callable[..., Any]) -> None:
    """Answer the calls of the driver that connects next, on a thread.

    `answer` takes a method's name and its arguments, and raises nothing.
    """

    def serve() -> None:
        answers: SimpleQueue[Any] = SimpleQueue()
        with accept(listener, secret) as connection, suppress(EOFError, OSError):
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


class Answer(Future[Any]):
    """What a host answers to a call; it comes while somebody waits for it."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls


class Calls:
    """The driver's calls to one host, which answers them in their order.

    What comes after a call that failed fails as it did.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._waiting: deque[Answer] = deque()
        self._failure: Failure | None = None

    def begin(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Send a call; its answer, or the ConnectionError that none comes.

        A frozen host may not take it: the heartbeat ends that, and the wait here.
        """
        answer = Answer(self)
        self._waiting.append(answer)
        with suppress(OSError):  # then reading the answer fails, too
            send(self.connection, (method, arguments))
        return answer

    def read(self) -> None:
        """Take the next answer, which has come, or the end of all of them."""
        try:
            answer = receive(self.connection)
        except (EOFError, OSError):
            while self._waiting:
                ended = ConnectionError("its connection ended.")
                self._waiting.popleft().set_exception(ended)
            return
        if self._failure is None and isinstance(answer, Failure):
            self._failure = answer
        self._waiting.popleft().set_result(self._failure or answer)


def wait_for(answers: Collection[Future[Any]], seconds: float) -> list[Future[Any]]:
    """Those answers of a call that have come, after some seconds at most."""
    direct = {a.calls.connection: a.calls for a in answers if isinstance(a, Answer)}
    if not direct:
        return [*futures.wait(answers, seconds, futures.FIRST_COMPLETED)[0]]
    if not any(answer.done() for answer in answers):
        for connection in wait([*direct], seconds):
            direct[connection].read()  # type: ignore[index]
    return [answer for answer in answers if answer.done()]


def in_background(run: Callable[[], None]) -> None:
    """Start a thread that ends with the process."""
    threading.Thread(target=run, daemon=True).start()


class PeerLost(Exception):
    """The host at the other end is gone; its own failure is the cause."""


@dataclass(frozen=True)
class Offer:
    """A value of a job that one stage has for another, in words its tiles."""

    number: int
    job: int
    value: Value
    source: int
    target: int
    tiles: str


class Transport:
    """A host's listener, its transfer server, and its links to other hosts.

    Arguments:
      address: of the network card that other hosts reach.
      secret: what only hosts of the same run, and its driver, know.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address, self.secret = address, secret
        self.listener = Listener((address, 0), backlog=_MOST_WAITING)
        # Where other hosts, and the driver, connect to.
        self.control_address: Address = self.listener.address  # type: ignore[assignment]
        self._numbers = itertools.count(1)
        self._rank = 0
        self._links: dict[int, _Link] = {}
        self._jobs: dict[int, _Transfers] = {}
        self._job, self._transfers = 0, _Transfers()

    def connect(
        self,
        rank: int,
        peers: Mapping[int, Address],
        read: Callable[[int, int], _Parts],
    ) -> dict[int, str]:
        """Connect to some hosts, by their ranks, which connect to this one.

        `read` is another way to what a host offers under a number: its parts for the
        devices of this host.

        Returns why nothing can be pulled from the server of some of these.
        """
        self._rank = rank
        own, no_server = _started(self._address)
        with ThreadPoolExecutor(1, "accept") as thread:
            lower = [peer for peer in peers if peer < rank]
            accepted = thread.submit(
                lambda: [accept(self.listener, self.secret) for _ in lower]
            )
            higher = sorted(peers.keys() - lower)
            connections = [dial(peers[p], self.secret) for p in higher]
            connections += accepted.result()
        for each in connections:
            send(each, (rank, *self._shown(own), no_server))
        problems: dict[int, str] = {}
        reading: list[tuple[int, Any, Connection]] = []
        for each in connections:
            peer, address, number, problem = receive(each)
            server, problem = None, problem or no_server
            if not problem:
                server, problem = _probed(own, address, number)
            if problem:
                problems[peer] = problem
            send(each, not problem)
            reading.append((peer, server, each))
        for peer, server, each in reading:
            publish = own.await_pull if receive(each) else _nothing
            pull = server.pull if server else _read_by(partial(read, peer))
            # Brought before it is asked for, it would lie in this host's memory.
            kinds_of = partial(self._kinds_of, peer) if server else _nothing
            self._links[peer] = _Link(each, peer, publish, pull, kinds_of)
        return problems

    def _shown(self, own: Any) -> tuple[str, int]:
        """What another host may pull to see whether it can."""
        number = next(self._numbers)
        if own is None:
            return "", number
        own.await_pull(number, [jax.device_put(_PROBE, jax.local_devices()[0])])
        return own.address(), number

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
        named = self._job, value, source, target, transfer.tiles
        for peer, arrays in transfer.offers(array).items():
            self._links[peer].offer(Offer(next(self._numbers), *named), arrays)

    def offered_parts(self, peer: int, number: int) -> _Parts:
        """This host's parts of what it offers another host."""
        return [local_parts(array) for array in self._links[peer].offered(number)]

    def receive(self, value: Value, source: int, target: int) -> jax.Array:
        """The next value that a stage on other hosts offers.

        Raises:
          PeerLost: one of those hosts is gone.
          ValueError: it offers something else, or in other tiles.
        """
        transfer = self._transfers[value.slot, target]
        landed: dict[int, list[jax.Array]] = {}
        for peer, kinds in transfer.landings.items():
            offer, arrays = self._links[peer].next_offer(source, target)
            if (offer.value, offer.tiles) != (value, transfer.tiles):
                raise ValueError(
                    f"what is pulled has the tiles that were offered, or its data "
                    f"would be wrong, but stage {source} offers {offer}, and {value} "
                    f"in {transfer.tiles} is due; the hosts run different jobs, which "
                    f"is a bug."
                )
            if arrays is None:
                arrays = self._links[peer].pull(offer.number, kinds)
            landed[peer] = arrays
        return transfer.receive(landed)

    def _kinds_of(self, peer: int, offer: Offer) -> _Kinds | None:
        """What an offer lands as, if a job that is loaded here expects its tiles."""
        key = offer.value.slot, offer.target
        transfer = self._jobs.get(offer.job, {}).get(key)
        if transfer is None or transfer.tiles != offer.tiles:
            return None
        return transfer.landings.get(peer)

    def wait_for_readers(self, arrays: Sequence[Any] | None = None) -> None:
        """Until nobody reads these arrays any more, or any that was offered.

        Raises:
          PeerLost: a reader is gone.
        """
        for link in self._links.values():
            link.wait_for_readers(arrays)


class _Link:
    """What this host and one other offer each other, over their connection.

    An offer is read exactly once, and acknowledged when its data is there; until then
    what was offered is neither donated nor freed.

    Arguments:
      connection: to the other host.
      peer: the rank of that host.
      publish: lets it read arrays under a number.
      pull: brings what it offers under a number, as arrays of given types.
      kinds_of: the types of what is to be brought as soon as it is offered; None where
        that waits until it is asked for.
    """

    def __init__(
        self,
        connection: Connection,
        peer: int,
        publish: Callable[[int, Sequence[jax.Array]], None],
        pull: Callable[[int, _Kinds], list[jax.Array]],
        kinds_of: Callable[[Offer], _Kinds | None],
    ) -> None:
        self.connection, self.peer = connection, peer
        self._publish, self._pull, self._kinds_of = publish, pull, kinds_of
        self._ours: dict[int, Sequence[jax.Array]] = {}
        self._theirs: defaultdict[
            tuple[int, int], deque[tuple[Offer, list[jax.Array] | None]]
        ] = defaultdict(deque)
        self._arriving: SimpleQueue[tuple[int, Sequence[jax.Array]]] = SimpleQueue()
        self._one_message = threading.Lock()  # the lanes of a host send at once
        self._changed = threading.Condition()
        self._end: Exception | None = None
        in_background(self._read)
        in_background(self._acknowledge)

    def offer(self, offer: Offer, arrays: Sequence[jax.Array]) -> None:
        """Offer arrays, and keep them.

        Raises:
          PeerLost: the other host is gone.
        """
        with self._changed:
            self._ours[offer.number] = arrays
        self._publish(offer.number, arrays)
        try:
            self._send(offer)
        except OSError as error:
            raise self._lost(error) from error

    def offered(self, number: int) -> Sequence[jax.Array]:
        """What is offered under a number, and not acknowledged yet."""
        with self._changed:
            return self._ours[number]

    def wait_for_readers(self, arrays: Sequence[Any] | None) -> None:
        """Until none of these arrays is offered any more, or no array at all.

        Raises:
          PeerLost: the reader is gone.
        """
        wanted = None if arrays is None else {id(array) for array in arrays}

        def is_read() -> bool:
            offered = (id(array) for each in self._ours.values() for array in each)
            return not any(wanted is None or each in wanted for each in offered)

        with self._changed:
            self._changed.wait_for(lambda: is_read() or self._end)
            if not is_read():
                raise self._lost(self._end)

    def next_offer(
        self, source: int, target: int
    ) -> tuple[Offer, list[jax.Array] | None]:
        """What a stage there offers a stage here next, and its data if that is coming.

        Waits for the offer.

        Raises:
          PeerLost: the host is gone.
        """
        with self._changed:
            offers = self._theirs[source, target]
            self._changed.wait_for(lambda: offers or self._end)
            if not offers:
                raise self._lost(self._end)
            return offers.popleft()

    def pull(self, number: int, kinds: _Kinds) -> list[jax.Array]:
        """Read an offer of arrays of these types; they may still be on their way."""
        arrays = self._pull(number, [*kinds])
        self._arriving.put((number, arrays))
        return arrays

    def _read(self) -> None:
        """Take offers, and acknowledgements, which are numbers."""
        try:
            while True:
                found: Offer | int = receive(self.connection)
                if isinstance(found, int):
                    with self._changed:
                        del self._ours[found]
                        self._changed.notify_all()
                    continue
                kinds = self._kinds_of(found)
                arrays = None if kinds is None else self.pull(found.number, kinds)
                with self._changed:
                    self._theirs[found.source, found.target].append((found, arrays))
                    self._changed.notify_all()
        except Exception as error:  # raised again where an offer is waited for
            with self._changed:
                self._end = error
                self._changed.notify_all()

    def _acknowledge(self) -> None:
        while True:
            number, arrays = self._arriving.get()
            try:
                jax.block_until_ready(arrays)
                self._send(number)
            except (jax.errors.JaxRuntimeError, OSError):
                return  # whoever uses the arrays meets the same error
            del arrays

    def _send(self, message: Offer | int) -> None:
        with self._one_message:
            send(self.connection, message)

    def _lost(self, end: Exception | None) -> Exception:
        """The error that says why nothing comes any more."""
        if not isinstance(end, _ENDS):
            return end or AssertionError("nothing ended")
        lost = PeerLost(f"host {self.peer} closed its connection")
        if isinstance(end, jax.errors.JaxRuntimeError):
            lost = PeerLost(f"nothing comes from host {self.peer} any more: {end}")
        lost.__cause__ = end
        return lost


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


def _nothing(*_: Any) -> None:
    """Who reads what is offered asks for it, when it is wanted."""


def _read_by(
    read: Callable[[int], _Parts],
) -> Callable[[int, _Kinds], list[jax.Array]]:
    """Reads offers through the memory of the hosts."""
    return lambda number, kinds: [
        from_local_parts(parts, kind.shape, kind.sharding)
        for parts, kind in zip(read(number), kinds, strict=True)
    ]
