"""Scatters that replace are split over what is indexed: the last update stays.

That the last update of a position stays is what XLA does on CPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.sharding.spec import REPLICATED
from tests.marks import slow
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_sizes,
    factor_table,
    operator_of,
    random_array,
)

DTYPES = ("bfloat16", "int32", "uint8", "bool", "complex64")


def random_ids(*shape: int, below: int, seed: int = 0, least: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(least, below, shape).astype(np.int32)


def dispatch(
    buffer: jax.Array, experts: jax.Array, slots: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Tokens at their places in a buffer [experts, capacity, width]."""
    return buffer.at[experts, slots].set(tokens, mode="drop")


def test_factors_of_a_dispatch() -> None:
    ids = random_ids(16, below=8)
    buffer, tokens = random_array(8, 4, 6), random_array(16, 6)
    op = operator_of("scatter", dispatch, buffer, ids, ids // 2, tokens)
    assert factor_table(op) == {
        "w2": ((2, REPLICATED, 1), (2,)),
        "v0": ((0, REPLICATED, REPLICATED), (0,)),
        "v1": ((1, REPLICATED, REPLICATED), (1,)),
    }
    assert factor_sizes(op) == {"w2": 6, "v0": 8, "v1": 4}


@pytest.mark.parametrize("mesh", [MESH_2X4, MESH_8], ids=str)
def test_tokens_in_a_buffer_of_experts(mesh: object) -> None:
    """Places are taken twice, some are out of range, and some are never taken."""
    reached = check_every_strategy(
        dispatch,
        random_array(8, 4, 6),
        random_ids(16, below=9),
        random_ids(16, below=6, least=-1, seed=1),
        random_array(16, 6, seed=2),
        kinds=("scatter",),
        mesh=mesh,  # type: ignore[arg-type]
    )
    assert "v0" in reached["scatter"]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *(("drop", dtype) for dtype in DTYPES),
        ("clip", "bfloat16"),
        *(slow("clip", d) for d in DTYPES[1:]),
    ],
)
def test_what_is_replaced_may_be_of_any_type(dtype: str, mode: str) -> None:
    draw = random_array(8, 4), random_array(4, 4, 4, seed=1)
    x, updates = (jnp.asarray(10 * each).astype(dtype) for each in draw)
    reached = check_every_strategy(
        lambda x, ids, updates: x.at[ids].set(
            updates, mode=mode, wrap_negative_indices=False
        ),
        x,
        random_ids(4, 4, below=10, least=-2),
        updates,
        kinds=("scatter",),
        max_strategies=24,
    )
    assert "v0" in reached["scatter"]


def test_groups_of_tokens_have_buffers_of_their_own() -> None:
    experts, slots = random_ids(2, 8, below=8), random_ids(2, 8, below=3, seed=1)
    reached = check_every_strategy(
        jax.vmap(dispatch),
        random_array(2, 8, 2, 4),
        experts,
        slots,
        random_array(2, 8, 4, seed=2),
        kinds=("scatter",),
    )
    assert {"i0", "v1", "v2", "w3"} <= reached["scatter"]


def test_windows_that_reach_over_several_positions_are_replaced_whole() -> None:
    """They overlap in part, so no one update is the last of a row."""
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))

    def function(x: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
        return jax.lax.scatter(x, ids[:, None], updates, numbers, mode="clip")

    reached = check_every_strategy(
        function,
        random_array(8, 4),
        random_ids(4, below=8),
        random_array(4, 2, 4, seed=1),
        kinds=("scatter",),
    )
    assert reached["scatter"] == {"-", "w1"}


def test_functions_are_applied_where_a_position_is_held() -> None:
    def function(x: jax.Array) -> jax.Array:
        return x.at[np.array([1, 9, 6, 3])].apply(jnp.sin, mode="drop")

    reached = check_every_strategy(function, random_array(8, 4), kinds=("scatter",))
    assert reached["scatter"] == {"-", "w1", "v0"}


def test_infinite_and_undefined_numbers_are_moved_as_they_are() -> None:
    updates = random_array(8, 4)
    updates[::3, 1], updates[5] = np.inf, np.nan
    x = random_array(8, 4, seed=1)
    x[2] = -np.inf
    reached = check_every_strategy(
        lambda x, ids, updates: x.at[ids].set(updates),
        x,
        np.array([3, 3, 0, 7, 1, 1, 3, 0], np.int32),
        updates,
        kinds=("scatter",),
    )
    assert {"v0", "w1"} <= reached["scatter"]
