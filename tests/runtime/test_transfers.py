"""Transfers deliver arrays, send each byte once, refuse what is slow or wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.transfers import (
    Transfer,
    TransferPlan,
    move_tiles,
    plan_transfer,
    tiles,
)

P = PartitionSpec


def _home(first: int, axes: dict[str, int], spec: PartitionSpec) -> NamedSharding:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[first : first + count])
    return NamedSharding(Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), spec)


ROW = {"x": 4}
SQUARE = {"y": 2, "z": 2}
PAIR = {"w": 2}
SOURCES = [_home(0, ROW, spec) for spec in (P(), P("x"), P(None, "x"))]
TARGETS = [
    *(_home(4, SQUARE, s) for s in (P(), P("y"), P("z", "y"), P(None, ("y", "z")))),
    *(_home(4, PAIR, s) for s in (P(), P(None, "w"))),
]


def _arrays(transfer: TransferPlan) -> tuple[jax.Array, jax.Array]:
    x = jnp.arange(np.prod(transfer.shape), dtype=transfer.dtype)
    x = jax.device_put(x.reshape(transfer.shape), transfer.source)
    return x, Transfer(transfer)(x)


@pytest.mark.parametrize("is_back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("source, target", itertools.product(SOURCES, TARGETS))
def test_every_byte_is_sent_once(
    source: NamedSharding, target: NamedSharding, is_back: bool
) -> None:
    if is_back:
        source, target = target, source
    plan = plan_transfer((8, 16), jnp.float32, source, target)
    before, after = _arrays(plan)
    assert after.sharding.is_equivalent_to(target, 2)
    np.testing.assert_array_equal(after, before)
    assert plan.sent_bytes == 8 * 16 * 4


@pytest.mark.parametrize("source, target", itertools.product(SOURCES, TARGETS[:4]))
def test_the_bytes_that_cross_are_those_planned(
    source: NamedSharding, target: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    put = jax.device_put

    def counting(x: jax.Array, where: NamedSharding) -> jax.Array:
        assert tiles(x.shape, x.sharding) == tiles(x.shape, where)  # type: ignore
        sent.append(sum(shard.data.nbytes for shard in x.addressable_shards))
        return put(x, where)

    plan = plan_transfer((8, 16), jnp.float32, source, target)
    x = put(jnp.ones((8, 16)), source)
    monkeypatch.setattr(jax, "device_put", counting)
    Transfer(plan)(x)
    assert sent == [plan.sent_bytes]


def test_the_side_that_moves_fewer_bytes_reshards() -> None:
    wide, whole = _home(4, SQUARE, P("y", "z")), _home(4, SQUARE, P())
    to_whole = plan_transfer((8, 16), jnp.float32, SOURCES[1], whole)
    assert to_whole.sent == SOURCES[1]
    from_whole = plan_transfer((8, 16), jnp.float32, SOURCES[0], wide)
    assert from_whole.landed == wide
    assert from_whole.resharded_bytes == 0
    alike = plan_transfer((8, 16), jnp.float32, SOURCES[1], _home(4, ROW, P("x")))
    assert (alike.sent, alike.landed) == (alike.source, alike.target)


@pytest.mark.parametrize(
    "shape, dtype, sent_bytes",
    [((), jnp.float32, 16), ((3, 5), jnp.bfloat16, 32), ((7,), jnp.int8, 8)],
)
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[4]])
def test_what_no_axis_divides_is_padded(
    shape: tuple[int, ...], dtype: jnp.dtype, sent_bytes: int, target: NamedSharding
) -> None:
    plan = plan_transfer(shape, dtype, SOURCES[0], target)
    before, after = _arrays(plan)
    np.testing.assert_array_equal(after, before)
    assert plan.sent_bytes == sent_bytes


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[4]])
def test_an_empty_array_arrives(target: NamedSharding) -> None:
    _, after = _arrays(plan_transfer((0, 4), jnp.float32, SOURCES[0], target))
    assert after.shape == (0, 4)
    assert after.sharding.is_equivalent_to(target, 2)


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[4]])
def test_random_keys_are_sent(target: NamedSharding) -> None:
    key = jax.device_put(jax.random.key(3), SOURCES[0])
    sent = Transfer(plan_transfer(key.shape, key.dtype, SOURCES[0], target))(key)
    assert int(jax.random.bits(sent)) == int(jax.random.bits(key))


def test_on_the_same_devices_nothing_is_sent_and_the_buffer_is_another() -> None:
    target = _home(0, SQUARE, P("z", "y"))
    plan = plan_transfer((8, 16), jnp.float32, SOURCES[1], target)
    before, after = _arrays(plan)
    assert plan.sent_bytes == 0
    np.testing.assert_array_equal(after, before)
    same = plan_transfer((8, 16), jnp.float32, SOURCES[1], SOURCES[1])
    before, after = _arrays(same)
    before.delete()
    assert after.sum() == sum(range(128))


def test_other_tiles_are_not_moved() -> None:
    x = jax.device_put(jnp.ones((8, 16)), SOURCES[1])
    with pytest.raises(AssertionError, match="otherwise than"):
        move_tiles(x, _home(4, ROW, P(None, "x")))
    with pytest.raises(AssertionError, match="otherwise than"):
        move_tiles(x, _home(4, SQUARE, P(("z", "y"))))


def test_an_array_that_was_not_planned_for_is_refused() -> None:
    send = Transfer(plan_transfer((8, 16), jnp.float32, SOURCES[1], TARGETS[0]))
    x = jax.device_put(jnp.ones((8, 16)), SOURCES[1])
    for wrong in (x[:4], x.astype(jnp.int32), jax.device_put(x, SOURCES[2])):
        with pytest.raises(AssertionError, match="is not what goes"):
            send(wrong)
    x.delete()
    with pytest.raises(AssertionError, match="was donated or deleted before"):
        send(x)


def test_sides_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="partitioned 4 times"):
        plan_transfer((6, 16), jnp.float32, SOURCES[1], TARGETS[0])
    with pytest.raises(AssertionError, match="overlap"):
        plan_transfer((8, 16), jnp.float32, SOURCES[1], _home(2, ROW, P("x")))
    turned = Mesh(np.array(jax.devices()[3::-1]), ("x",))
    with pytest.raises(AssertionError, match="overlap"):
        plan_transfer((8,), jnp.float32, SOURCES[0], NamedSharding(turned, P()))
    host = TARGETS[0].with_memory_kind("pinned_host")
    with pytest.raises(ValueError, match="keeps the kind of memory"):
        plan_transfer((8, 16), jnp.float32, SOURCES[1], host)
