"""random_bits and threefry2x32: every shard's bits equal those of one device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from autopar.rules.random import count_positions
from tests.rules.strategy_oracle import (
    MESH_2X4,
    check_every_strategy,
    factor_table,
    operator_of,
)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_bits_of_every_width(dtype: str) -> None:
    with jax.enable_x64(dtype == "uint64"):
        reached = check_every_strategy(
            lambda key: jax.random.bits(key, (4, 8, 2), dtype),
            jax.random.key(7),
            kinds=("random_bits",),
            max_strategies=10,
        )
    assert reached["random_bits"] == {"-", "d0", "d1", "d2"}


@pytest.mark.parametrize(
    "sample",
    [
        lambda key: jax.random.bernoulli(key, 0.9, (8, 12)),
        lambda key: jax.random.normal(key, (8, 12), jnp.bfloat16),
        lambda key: jax.random.uniform(jax.random.fold_in(key, 3), (16,)),
        lambda key: jax.random.normal(jax.random.split(key)[1], (4, 8)),
    ],
    ids=["bernoulli", "normal", "uniform", "split"],
)
def test_samples(sample: Callable[..., jax.Array]) -> None:
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        check_every_strategy(
            sample, key, kinds=("random_bits",), mesh=MESH_2X4, max_strategies=4
        )


def test_batched_keys() -> None:
    reached = check_every_strategy(
        jax.vmap(lambda key: jax.random.bits(key, (2, 4))),
        jax.random.split(jax.random.key(0), (8,)),
        kinds=("random_bits",),
        max_strategies=10,
    )
    assert reached["random_bits"] == {"-", "d0", "d1", "d2"}
    check_every_strategy(
        jax.vmap(jax.vmap(lambda key: jax.random.bits(key))),
        jax.random.split(jax.random.key(0), (4, 2)),
        kinds=("random_bits",),
        max_strategies=10,
    )


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_other_generators_keep_a_part(impl: str) -> None:
    with jax.threefry_partitionable(False):
        check_every_strategy(
            lambda key: jax.random.bits(key, (4, 8)),
            jax.random.key(1, impl=impl),
            kinds=("random_bits",),
            max_strategies=10,
        )


def test_bits_become_floats_where_they_are() -> None:
    bits = np.arange(32, dtype=np.uint32).reshape(4, 8)
    for dtype in ("float32", "uint16"):
        reached = check_every_strategy(
            lambda bits, dtype=dtype: jax.lax.bitcast_convert_type(bits, dtype),
            bits,
            kinds=("bitcast_convert_type",),
            max_strategies=10,
        )
        assert reached["bitcast_convert_type"] == {"-", "d0", "d1"}


def test_threefry_is_elementwise() -> None:
    words = np.arange(32, dtype=np.uint32).reshape(4, 8)

    def hash_words(key: jax.Array, words: jax.Array) -> list[jax.Array]:
        return threefry2x32_p.bind(key[0], key[1], words, words + 7)

    reached = check_every_strategy(
        hash_words,
        np.array([1, 2], np.uint32),
        words,
        kinds=("threefry2x32",),
        max_strategies=10,
    )
    assert reached["threefry2x32"] == {"-", "d0", "d1"}


def test_keys_are_never_split() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    op = operator_of("random_split", lambda k: jax.vmap(jax.random.split)(k), keys)
    assert not factor_table(op)
    check_every_strategy(
        lambda seed: jax.random.split(jax.random.fold_in(jax.random.key(seed), 1)),
        np.int32(4),
        kinds=("random_seed", "random_fold_in", "random_split"),
    )


@pytest.mark.parametrize(
    "shape",
    [
        (5, 7),
        (2**16, 2**16, 4),
        (3, 2**20 + 7, 2**16 + 1, 5),
        (2**31 - 1, 2**31 - 1, 3),
    ],
    ids=str,
)
def test_positions_of_tensors_with_more_than_32_bits(shape: tuple[int, ...]) -> None:
    starts = [max(0, size - 3) for size in shape]
    local = tuple(size - start for size, start in zip(shape, starts, strict=True))
    high, low = count_positions(shape, local, [jnp.uint32(start) for start in starts])
    for place in np.ndindex(*local):
        position = 0
        for size, start, index in zip(shape, starts, place, strict=True):
            position = position * size + start + index
        assert (int(high[place]), int(low[place])) == divmod(position, 2**32)
