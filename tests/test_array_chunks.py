"""One leaf and its chunks on meshes of their own: joined and split without a copy."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.state.array_chunks import gather_leaf, join_leaf, split_leaf
from autopar.state.distributed_array import DistributedArray

WHOLE = np.arange(6 * 8 * 4, dtype=np.float32).reshape(6, 8, 4)


def on(first: int, number: int, *spec: Any) -> NamedSharding:
    """A sharding on `number` devices from device `first` on."""
    mesh = Mesh(np.array(jax.devices()[first : first + number]), ("x",))
    return NamedSharding(mesh, PartitionSpec(*spec))


def placed(lengths: list[int], shardings: list[NamedSharding]) -> list[jax.Array]:
    return jax.device_put(split_leaf(WHOLE, lengths, shardings), shardings)


def addresses(array: jax.Array) -> dict[int, int]:
    """Where each device holds its shard."""
    return {
        shard.device.id: shard.data.unsafe_buffer_pointer()
        for shard in array.addressable_shards
    }


EQUAL = [
    [on(0, 4, None, "x"), on(4, 4, None, "x")],
    [on(0, 2), on(2, 2)],
    [on(2, 2, None, "x", None), on(0, 2, None, "x")],
]


@pytest.mark.parametrize("shardings", EQUAL, ids=str)
def test_equal_chunks_are_one_array_in_place(shardings: list[NamedSharding]):
    chunks = placed([3, 3], shardings)
    leaf = join_leaf(chunks)
    assert isinstance(leaf, jax.Array)
    np.testing.assert_array_equal(leaf, WHOLE)
    assert addresses(leaf) == addresses(chunks[0]) | addresses(chunks[1])
    for again, chunk in zip(split_leaf(leaf, [3, 3], shardings), chunks, strict=True):
        assert again.sharding == chunk.sharding
        assert addresses(again) == addresses(chunk)


def test_dim_0_may_be_split_by_the_submesh_too():
    shardings = [on(0, 3, "x"), on(3, 3, "x")]
    leaf = join_leaf(placed([3, 3], shardings))
    assert leaf.sharding.spec == PartitionSpec(("stage", "x"), None, None)
    np.testing.assert_array_equal(leaf, WHOLE)


UNEQUAL = [
    ([2, 4], [on(0, 4, None, "x"), on(4, 4, None, "x")]),
    ([3, 3], [on(0, 4, None, "x"), on(4, 4, None, None, "x")]),
    ([3, 3], [on(0, 4, None, "x"), on(4, 2, None, "x")]),
    ([3, 3], [on(0, 4, None, "x"), on(0, 4, None, "x")]),
]


@pytest.mark.parametrize(("lengths", "shardings"), UNEQUAL, ids=str)
def test_other_chunks_are_a_distributed_array(
    lengths: list[int], shardings: list[NamedSharding]
):
    chunks = placed(lengths, shardings)
    leaf = join_leaf(chunks)
    assert isinstance(leaf, DistributedArray)
    np.testing.assert_array_equal(np.asarray(leaf), WHOLE)
    for again, chunk in zip(split_leaf(leaf, lengths, shardings), chunks, strict=True):
        assert again is chunk


@pytest.mark.parametrize("lengths", [[3, 3], [1, 1, 4], [6]])
def test_other_lengths_are_cut_anew(lengths: list[int]):
    leaf = join_leaf(placed([2, 4], [on(0, 4), on(4, 4)]))
    chunks = split_leaf(leaf, lengths, [on(0, 4)] * len(lengths))
    assert [chunk.shape[0] for chunk in chunks] == lengths
    np.testing.assert_array_equal(np.concatenate(chunks), WHOLE)


def test_a_small_result_is_one_array():
    chunks = placed([2, 4], [on(0, 4, None, "x"), on(4, 2)])
    leaf = gather_leaf(chunks)
    assert leaf.sharding.device_set == chunks[0].sharding.device_set
    np.testing.assert_array_equal(leaf + 0, WHOLE)


def test_a_plain_array_is_cut():
    for leaf in (WHOLE, jax.numpy.asarray(WHOLE)):
        chunks = split_leaf(leaf, [1, 5], [on(0, 2), None])
        assert [chunk.shape[0] for chunk in chunks] == [1, 5]
        np.testing.assert_array_equal(np.concatenate(chunks), WHOLE)
        assert isinstance(join_leaf(chunks), type(leaf) | DistributedArray)


def test_lengths_must_add_up():
    with pytest.raises(ValueError, match="must add up to its dim 0"):
        split_leaf(WHOLE, [3, 2], [None, None])


@pytest.mark.parametrize("lengths", [[3, 3], [2, 4]])
def test_a_donated_leaf_is_refused(lengths: list[int]):
    shardings = [on(0, 4), on(4, 4)]
    chunks = placed(lengths, shardings)
    leaf = join_leaf(chunks)
    for chunk in split_leaf(leaf, lengths, shardings):
        jax.jit(lambda x: x + 1, donate_argnums=0)(chunk)
    with pytest.raises(ValueError, match="pass what that returned"):
        split_leaf(leaf, lengths, shardings)
