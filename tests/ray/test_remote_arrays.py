"""Arrays cut for hosts and joined again, and handles to arrays of workers."""

import gc
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.lowering.exported_program import ShardedType
from autopar.runtime.ray_arrays import RemoteArray
from autopar.runtime.ray_job import Block, cut_for_hosts, join_blocks
from autopar.runtime.ray_workers import Workers as RealWorkers

AXES = {"a": 2, "b": 2, "c": 2}


@st.composite
def sharded_types(draw: st.DrawFn) -> ShardedType:
    """Arrays of up to three dims, split over any of the axes in any order."""
    rank = draw(st.integers(0, 3))
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(list(AXES))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    shape = tuple(
        draw(st.integers(1, 2)) * math.prod(AXES[axis] for axis in axes)
        for axes in dims
    )
    return ShardedType(
        shape, "float32", tuple(AXES), tuple(AXES.values()), tuple(map(tuple, dims))
    )


@given(type_=sharded_types())
def test_a_tile_is_the_one_that_jax_gives_the_device(type_: ShardedType):
    grid = np.array(jax.devices()).reshape(type_.axis_sizes)
    mesh = Mesh(grid, type_.axis_names, axis_types=(AxisType.Auto,) * 3)
    sharding = type_.on(mesh)
    by_device = sharding.devices_indices_map(type_.shape)
    for number, device in enumerate(jax.devices()):
        expected = [
            part.indices(size)
            for part, size in zip(by_device[device], type_.shape, strict=True)
        ]
        found = type_.tile(number)
        assert [
            part.indices(size) for part, size in zip(found, type_.shape, strict=True)
        ] == expected
    assert ShardedType.of(type_.shape, "float32", sharding) == type_


@given(type_=sharded_types(), num_hosts=st.sampled_from([1, 2, 4]))
def test_what_is_cut_for_hosts_is_joined_to_the_same(
    type_: ShardedType, num_hosts: int
):
    whole = np.random.default_rng(0).standard_normal(type_.shape).astype(np.float32)
    hosts = cut_for_hosts(whole, type_, num_hosts)
    per_host = 8 // num_hosts
    blocks: dict[Any, Block] = {}
    for number, host in enumerate(hosts):
        by_tile = {block.tile: block.data for block in host}
        assert len(by_tile) == len(host), "each tile goes once"
        own = set()
        for device in range(number * per_host, (number + 1) * per_host):
            index = type_.tile(device)
            ranges = tuple((part.start, part.stop) for part in index)
            np.testing.assert_array_equal(by_tile[ranges], whole[index])
            own.add(ranges)
        assert own == by_tile.keys()
        blocks |= {block.tile: block for block in host}
    joined = join_blocks(type_, blocks.values())
    np.testing.assert_array_equal(joined, whole)


def test_blocks_that_do_not_cover_are_refused():
    with pytest.raises(AssertionError, match="cover 1 of 4"):
        join_blocks(TYPE, [Block(((0, 1),), np.zeros(1, np.int32))])


def test_random_keys_are_their_data():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    keys = jax.random.split(jax.random.key(0), 8)
    type_ = ShardedType.of(keys.shape, keys.dtype, sharding)
    assert (type_.shape, type_.dtype, type_.dims) == ((8, 2), "uint32", (("x",), ()))


class Workers:
    """Workers that keep nothing."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.lost_rank: int | None = None
        self._dropped: deque[tuple[int, int]] = deque()

    def fetch(self, number: int, group: int, type_: ShardedType) -> np.ndarray:
        return np.full(type_.shape, number, type_.dtype)

    def ranks_of(self, group: int) -> list[int]:
        return [group]

    def freed(self, group: int) -> tuple[int, ...]:
        real: Any = RealWorkers
        return real.freed_by_rank(self, [group])[group]

    def forget(self, number: int, group: int) -> None:
        real: Any = RealWorkers
        real.forget(self, number, group)

    def copy_out(self, arrays: Sequence[RemoteArray]) -> int:
        raise AssertionError("nothing is saved here")

    def write_out(self, ticket: int, writings: Any) -> Any:
        raise AssertionError("nothing is saved here")


TYPE = ShardedType((4,), "int32", ("x",), (2,), ((),))


def test_a_dropped_handle_is_freed_once_in_its_group():
    workers = Workers()
    array, other = RemoteArray(workers, 0, 5, TYPE), RemoteArray(workers, 1, 6, TYPE)
    np.testing.assert_array_equal(array, [5] * 4)
    array.delete()
    assert array.is_deleted() and not other.is_deleted()
    del array, other
    gc.collect()
    assert workers.freed(0) == (5,)
    assert workers.freed(0) == ()
    assert workers.freed(1) == (6,)


def test_donated_and_lost_arrays_say_what_to_do():
    workers = Workers()
    donated, lost = RemoteArray(workers, 0, 1, TYPE), RemoteArray(workers, 0, 2, TYPE)
    donated.mark_donated()
    with pytest.raises(RuntimeError, match="Pass the state that the last call"):
        np.asarray(donated)
    workers.lost = "host 1 died."
    assert lost.is_deleted()
    with pytest.raises(RuntimeError, match=r"gone: host 1 died\. Restore it"):
        np.asarray(lost)
