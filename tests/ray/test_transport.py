"""Transfers between hosts, over the real transport between two ends in this process."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.lowering.exported_program import ShardedType
from autopar.runtime import ray_transport
from autopar.runtime.instructions import Value
from autopar.runtime.ray_job import Crossing, meet
from autopar.runtime.ray_programs import sharding_of
from autopar.runtime.ray_transfers import host_transfer
from autopar.runtime.ray_transport import PeerLost, Transport

SECRET = b"secret"
JOB = 1
SOURCE, TARGET = 0, 1  # ranks of the two ends


def type_of(shape: tuple[int, ...], *dims: tuple[str, ...]) -> ShardedType:
    return ShardedType(shape, "float32", ("a", "b"), (2, 4), dims)


def on(size: int, first: int, shape: tuple[int, ...], *dims: str) -> ShardedType:
    """On so many devices from one of them on."""
    axes = tuple((dim,) if dim else () for dim in dims)
    return ShardedType(shape, "float32", ("a",), (size,), axes).at(first)


def at_host(type_: ShardedType) -> ShardedType:
    return replace(type_, memory="pinned_host")


TYPES = {
    "equal": (type_of((8, 8), ("a",), ("b",)), type_of((8, 8), ("a",), ("b",))),
    "transposed": (type_of((8, 8), ("a",), ("b",)), type_of((8, 8), ("b",), ("a",))),
    "gathered": (type_of((8, 8), ("a", "b"), ()), type_of((8, 8), (), ())),
    "cut": (type_of((16, 4), (), ()), type_of((16, 4), ("b",), ())),
    "uneven": (type_of((3, 5), (), ()), type_of((3, 5), (), ())),
    "scalar": (type_of(()), type_of(())),
    "to fewer": (type_of((16, 4), ("a",), ("b",)), on(2, 4, (16, 4), "a", "")),
    "to more": (on(2, 2, (16, 4), "", "a"), type_of((16, 4), ("b",), ())),
    "1 to 3": (on(1, 0, (6, 5), "", ""), on(3, 1, (6, 5), "a", "")),
    "2 to 3": (on(2, 6, (6, 5), "", ""), on(3, 0, (6, 5), "a", "")),
    "other devices": (on(2, 6, (8,), "a"), on(2, 2, (8,), "a")),
    "host": (at_host(on(2, 6, (8,), "a")), at_host(on(2, 2, (8,), ""))),
    "host to more": (at_host(on(2, 2, (8,), "a")), at_host(on(4, 0, (8,), "a"))),
}
CROSSING = {
    slot: Crossing(*types, (SOURCE,), (TARGET,)) for slot, types in TYPES.items()
}


@pytest.fixture(params=["server", "object store"])
def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Transport, Transport]]:
    """Hosts of two groups; both have the devices of this process."""
    is_direct = request.param == "server"
    if not is_direct:
        failed = None, "nothing comes"
        monkeypatch.setattr(ray_transport, "_probed", lambda *_: failed)
    first, second = both = [Transport("127.0.0.1", SECRET) for _ in range(2)]

    def read(rank: int, peer: int, number: int) -> Any:
        return both[peer].offered_parts(rank, number)

    with ThreadPoolExecutor() as threads:
        to_first = {0: first.control_address}
        other = threads.submit(second.connect, 1, to_first, partial(read, 1))
        problems = first.connect(0, {1: second.control_address}, partial(read, 0))
    assert problems == ({} if is_direct else {1: "nothing comes"})
    assert other.result() == ({} if is_direct else {0: "nothing comes"})
    crossing = {(slot, 1): each for slot, each in CROSSING.items()}
    crossing["equal", 0] = Crossing(*TYPES["equal"], (TARGET,), (SOURCE,))
    for end in (first, second):
        end.plan(JOB, crossing)
        end.use(JOB)
    yield first, second
    hang_up(first, 1)
    hang_up(second, 0)


def hang_up(end: Transport, peer: int) -> None:
    """As when the process of this end dies."""
    with socket.socket(fileno=os.dup(end._links[peer].connection.fileno())) as raw:
        with contextlib.suppress(OSError):  # the other end was first
            raw.shutdown(socket.SHUT_RDWR)


def array_of(type_: ShardedType) -> jax.Array:
    numbers = np.random.default_rng(0).standard_normal(type_.shape, np.float32)
    return jax.device_put(numbers, sharding_of(type_))


@pytest.mark.parametrize("slot", CROSSING)
def test_a_value_arrives_as_its_reader_wants_it(
    ends: tuple[Transport, Transport], slot: str
):
    source, target = TYPES[slot]
    array = array_of(source)
    ends[0].send(Value(slot, 0), 0, 1, array)
    got = ends[1].receive(Value(slot, 0), 0, 1)
    assert got.sharding.is_equivalent_to(sharding_of(target), got.ndim)
    np.testing.assert_array_equal(got, array)
    ends[0].wait_for_readers()


@pytest.mark.parametrize("slot", sorted(CROSSING.keys() - {"uneven", "scalar"}))
def test_what_is_offered_is_what_a_plan_predicts(slot: str):
    source, _ = TYPES[slot]
    offers = host_transfer(CROSSING[slot], SOURCE).offers(array_of(source))
    arrays = [array for each in offers.values() for array in each]
    sent = [shard.data.nbytes for a in arrays for shard in a.addressable_shards]
    assert sum(sent) == source.nbytes, "each byte once"


def test_values_of_two_pairs_of_stages_do_not_mix(ends: tuple[Transport, Transport]):
    array = array_of(TYPES["equal"][0])
    for end in ends:
        end.plan(JOB, {("equal", stage): CROSSING["equal"] for stage in (1, 3)})
        end.use(JOB)
    ends[0].send(Value("equal", 0), 0, 1, array)
    ends[0].send(Value("equal", 0), 2, 3, 2 * array)
    second = ends[1].receive(Value("equal", 0), 2, 3)
    first = ends[1].receive(Value("equal", 0), 0, 1)
    np.testing.assert_array_equal(2 * first, second)


def test_many_values_wait_for_their_reader_in_order(ends: tuple[Transport, Transport]):
    array = array_of(TYPES["transposed"][0])
    for i in range(20):
        ends[0].send(Value("transposed", i), 0, 1, array + i)
    for i in range(20):
        got = ends[1].receive(Value("transposed", i), 0, 1)
        np.testing.assert_allclose(got, np.asarray(array) + i, rtol=1e-6)
    ends[0].wait_for_readers()


def test_a_buffer_may_be_donated_only_after_its_reader_has_it(
    ends: tuple[Transport, Transport],
):
    array = array_of(TYPES["equal"][0])
    expected = np.asarray(array).copy()
    later, crossing = JOB + 1, {("equal", 1): CROSSING["equal"]}
    ends[0].plan(later, crossing)
    ends[0].use(later)
    ends[0].send(Value("equal"), 0, 1, array)  # of a job that its reader does not know
    waiting = threading.Thread(target=ends[0].wait_for_readers, args=([array],))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "nobody has read it"
    ends[0].wait_for_readers([jnp.zeros(3)])  # another array is free at once
    ends[1].plan(later, crossing)
    ends[1].use(later)
    got = ends[1].receive(Value("equal"), 0, 1)
    waiting.join(10)
    assert not waiting.is_alive()
    jax.jit(lambda x: x * 0, donate_argnums=0)(array)
    np.testing.assert_array_equal(got, expected)


def test_what_a_loaded_job_expects_comes_before_it_is_asked_for(
    ends: tuple[Transport, Transport], request: pytest.FixtureRequest
):
    array = array_of(TYPES["transposed"][0])
    expected = np.asarray(array).copy()
    ends[0].send(Value("transposed"), 0, 1, array)
    is_direct = "server" in request.node.callspec.id
    if is_direct:  # through the object store it would wait in the host's memory
        ends[0].wait_for_readers()
        jax.jit(lambda x: x * 0, donate_argnums=0)(array)
    got = ends[1].receive(Value("transposed"), 0, 1)
    np.testing.assert_array_equal(got, expected)


def test_other_tiles_than_expected_are_refused_before_the_pull(
    ends: tuple[Transport, Transport],
):
    gathered, _ = TYPES["gathered"]
    other = Crossing(gathered, gathered, (SOURCE,), (TARGET,))
    ends[0].plan(JOB, {("equal", 1): other})
    ends[0].use(JOB)
    ends[0].send(Value("equal"), 0, 1, array_of(gathered))
    with pytest.raises(ValueError, match="tiles that were offered"):
        ends[1].receive(Value("equal"), 0, 1)


def test_an_array_in_another_sharding_than_planned_is_refused(
    ends: tuple[Transport, Transport],
):
    with pytest.raises(AssertionError, match="is not what goes"):
        ends[0].send(Value("equal"), 0, 1, array_of(TYPES["gathered"][0]))


def test_a_closed_end_wakes_who_waits_for_it(ends: tuple[Transport, Transport]):
    ends[0].send(Value("equal"), 0, 1, array_of(TYPES["equal"][0]))
    hang_up(ends[1], 0)
    with pytest.raises(PeerLost, match="host 1"):
        ends[0].wait_for_readers()
    with pytest.raises(PeerLost, match="host 1"):
        ends[0].receive(Value("equal"), 1, 0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("a bug"), "a bug"),
        (jax.errors.JaxRuntimeError("no memory"), "from host 0 any more: no memory"),
    ],
)
def test_what_ends_the_reading_of_offers_is_told_to_who_waits(
    ends: tuple[Transport, Transport],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    told: str,
):
    def fail_with(_: Any) -> Any:
        raise error

    monkeypatch.setattr(ends[1]._links[0], "_kinds_of", fail_with)
    ends[0].send(Value("equal"), 0, 1, array_of(TYPES["equal"][0]))
    with pytest.raises((KeyError, PeerLost), match=told):
        ends[1].receive(Value("equal"), 0, 1)


@pytest.mark.parametrize(
    ("own", "others", "met"),
    [
        ([0], [1], {0: [1]}),
        ([0, 1], [2, 3], {0: [2], 1: [3]}),
        ([0], [1, 2], {0: [1, 2]}),
        ([0, 1], [2, 3, 4], {0: [2, 3], 1: [3, 4]}),
        ([5, 6, 7, 8], [1, 2], {5: [1], 6: [1], 7: [2], 8: [2]}),
    ],
)
def test_hosts_meet_those_that_hold_a_same_part(
    own: list[int], others: list[int], met: dict[int, list[int]]
):
    for rank in own:
        found = [peer for peer in others if meet(rank, own, peer, others)]
        assert found == met[rank]
        assert all(meet(peer, others, rank, own) for peer in found)


class Server:
    """A transfer server of which nothing can be pulled in the way that is given."""

    def __init__(self, pull: Callable[..., Any]) -> None:
        self.pull = pull

    def connect(self, address: str) -> "Server":
        return self


def fail(*_: Any) -> Any:
    raise ConnectionError("no way there")


def other_numbers(_: int, kinds: Sequence[Any]) -> list[jax.Array]:
    return [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]


@pytest.mark.parametrize(
    ("pull", "seconds", "problem"),
    [
        (fail, 60, "ConnectionError: no way there"),
        (other_numbers, 60, "other numbers come than were sent"),
        (lambda *_: time.sleep(1), 0.1, r"nothing comes from 10\.0\.0\.2:1 in 0\.1 s"),
    ],
    ids=["raises", "wrong", "hangs"],
)
def test_a_server_that_does_not_serve_is_found_out(
    pull: Callable[..., Any],
    seconds: float,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ray_transport, "_PROBE_SECONDS", seconds)
    server, found = ray_transport._probed(Server(pull), "10.0.0.2:1", 1)
    assert server is None and re.fullmatch(problem, found)
