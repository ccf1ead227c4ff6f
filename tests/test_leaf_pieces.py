"""One leaf and its pieces on meshes of their own: joined and split without a copy."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.state.distributed_array import DistributedArray
from autopar.state.leaf_pieces import gather_leaf, join_leaf, split_leaf

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
def test_equal_pieces_are_one_array_in_place(shardings: list[NamedSharding]):
    pieces = placed([3, 3], shardings)
    leaf = join_leaf(pieces)
    assert isinstance(leaf, jax.Array)
    np.testing.assert_array_equal(leaf, WHOLE)
    assert addresses(leaf) == addresses(pieces[0]) | addresses(pieces[1])
    for again, piece in zip(split_leaf(leaf, [3, 3], shardings), pieces, strict=True):
        assert again.sharding == piece.sharding
        assert addresses(again) == addresses(piece)


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
def test_other_pieces_are_a_distributed_array(
    lengths: list[int], shardings: list[NamedSharding]
):
    pieces = placed(lengths, shardings)
    leaf = join_leaf(pieces)
    assert isinstance(leaf, DistributedArray)
    np.testing.assert_array_equal(np.asarray(leaf), WHOLE)
    for again, piece in zip(split_leaf(leaf, lengths, shardings), pieces, strict=True):
        assert again is piece


@pytest.mark.parametrize("lengths", [[3, 3], [1, 1, 4], [6]])
def test_other_lengths_are_cut_anew(lengths: list[int]):
    leaf = join_leaf(placed([2, 4], [on(0, 4), on(4, 4)]))
    pieces = split_leaf(leaf, lengths, [on(0, 4)] * len(lengths))
    assert [piece.shape[0] for piece in pieces] == lengths
    np.testing.assert_array_equal(np.concatenate(pieces), WHOLE)


def test_a_small_result_is_one_array():
    pieces = placed([2, 4], [on(0, 4, None, "x"), on(4, 2)])
    leaf = gather_leaf(pieces)
    assert leaf.sharding.device_set == pieces[0].sharding.device_set
    np.testing.assert_array_equal(leaf + 0, WHOLE)


def test_a_plain_array_is_cut():
    for leaf in (WHOLE, jax.numpy.asarray(WHOLE)):
        pieces = split_leaf(leaf, [1, 5], [on(0, 2), None])
        assert [piece.shape[0] for piece in pieces] == [1, 5]
        np.testing.assert_array_equal(np.concatenate(pieces), WHOLE)
        assert isinstance(join_leaf(pieces), type(leaf) | DistributedArray)


def test_lengths_must_add_up():
    with pytest.raises(ValueError, match="must add up to its dim 0"):
        split_leaf(WHOLE, [3, 2], [None, None])


@pytest.mark.parametrize("lengths", [[3, 3], [2, 4]])
def test_a_donated_leaf_is_refused(lengths: list[int]):
    shardings = [on(0, 4), on(4, 4)]
    pieces = placed(lengths, shardings)
    leaf = join_leaf(pieces)
    for piece in split_leaf(leaf, lengths, shardings):
        jax.jit(lambda x: x + 1, donate_argnums=0)(piece)
    with pytest.raises(ValueError, match="pass what that returned"):
        split_leaf(leaf, lengths, shardings)
