"""gather and the scatters: rows by position, split over what is indexed as well."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.lax import GatherScatterMode

from autopar.rules import gather, scatter  # noqa: F401
from autopar.sharding.spec import MAX, REPLICATED, SUM
from tests.marks import slow
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    factor_table,
    operator_of,
)

MODES = ["clip", "fill", "promise_in_bounds"]


def random_array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_ids(
    *shape: int, below: int = 8, seed: int = 0, least: int = 0
) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(least, below, shape).astype(np.int32)


def gradient_of(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The gradient by the first argument of a weighted sum of the results."""

    def loss(x: jax.Array, *args: jax.Array) -> jax.Array:
        result = function(x, *args)
        weights = jnp.sin(jnp.arange(result.size, dtype=result.dtype))
        return jnp.sum(result * weights.reshape(result.shape))

    return jax.grad(loss)


def test_factors_of_an_embedding_and_its_gradient() -> None:
    table, ids = random_array(8, 4), random_ids(2, 6)

    def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table[ids]

    assert factor_table(operator_of("gather", embed, table, ids)) == {
        "i0": ((REPLICATED, 0), (0,)),
        "i1": ((REPLICATED, 1), (1,)),
        "w1": ((1, REPLICATED), (2,)),
        "v0": ((0, REPLICATED), (SUM,)),
        "sum0": ((SUM, REPLICATED), (SUM,)),
    }
    backward = operator_of("scatter-add", gradient_of(embed), table, ids)
    assert factor_table(backward) == {
        "i0": ((SUM, 0, 0), (SUM,)),
        "i1": ((SUM, 1, 1), (SUM,)),
        "w1": ((1, REPLICATED, 2), (1,)),
        "v0": ((0, REPLICATED, REPLICATED), (0,)),
        "sum0,2": ((SUM, REPLICATED, SUM), (SUM,)),
    }


def test_embedding_and_its_gradient() -> None:
    table, ids = random_array(8, 8), random_ids(4, 6)
    reached = check_every_strategy(
        gradient_of(lambda table, ids: table[ids] ** 2),
        table,
        ids,
        kinds=("gather", "scatter-add"),
        max_strategies=16,
    )
    assert {"i0", "i1", "w1", "v0", "sum0"} <= reached["gather"]
    assert {"i0", "i1", "w1", "v0", "sum0,2"} <= reached["scatter-add"]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *((mode, "float32") for mode in MODES),
        *(("fill", dtype) for dtype in ("bfloat16", "int32", "uint8")),
        *(
            slow(mode, dtype)
            for mode in ("clip", "promise_in_bounds")
            for dtype in ("bfloat16", "int32", "uint8")
        ),
    ],
)
def test_take_with_rows_out_of_range(mode: str, dtype: str) -> None:
    table = jnp.asarray(random_ids(16, 4, below=99), dtype)
    ids = random_ids(8, below=40, least=-20)
    reached = check_every_strategy(
        lambda table, ids: table.at[ids].get(mode=mode, wrap_negative_indices=False),
        table,
        ids,
        kinds=("gather",),
        mesh=MESH_2X4,
        max_strategies=12,
    )
    assert "v0" in reached["gather"]


@pytest.mark.parametrize("fill_value", [np.nan, np.inf, 0.0, -3.0])
def test_fill_values_are_counted_once(fill_value: float) -> None:
    reached = check_every_strategy(
        lambda table, ids: jnp.take(table, ids, axis=1, fill_value=fill_value),
        random_array(4, 8),
        random_ids(4, below=12),
        kinds=("gather",),
        max_strategies=16,
    )
    assert {"v1", "sum0"} <= reached["gather"]


@pytest.mark.usefixtures("usual_code_generator")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_narrow_and_unsigned_indices(dtype: str, mode: str) -> None:
    ids = np.array([0, 127, 5, 120, 64, 63, 1, 3]).astype(dtype)
    if dtype != "int8":
        ids[-3:] = np.iinfo(dtype).max

    def lookup_and_add(table: jax.Array, ids: jax.Array) -> jax.Array:
        numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
        kind = GatherScatterMode.from_any(mode)
        rows = lax.gather(table, ids[:, None], numbers, (1, 2), mode=kind)
        add = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return lax.scatter_add(table, ids[:, None], rows, add, mode=kind)

    for size in (16, 256):
        check_every_strategy(
            lookup_and_add,
            random_array(size, 2),
            ids,
            kinds=("gather", "scatter-add"),
            mesh=MESH_8,
        )


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
def test_take_along_axis_and_its_gradient(mode: str | None) -> None:
    def pick(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, ids, axis=-1, mode=mode)

    check_every_strategy(
        gradient_of(pick),
        random_array(4, 6, 8),
        random_ids(4, 6, 2, below=11),
        kinds=("gather", "scatter-add"),
        max_strategies=16,
    )


def test_cross_entropy_of_optax() -> None:
    logits, labels = random_array(4, 2, 8), random_ids(4, 2)

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    reached = check_every_strategy(
        jax.value_and_grad(loss),
        logits,
        labels,
        kinds=("gather", "scatter-add"),
        max_strategies=16,
    )
    assert {"v2", "i0", "i1"} <= reached["gather"]
    assert {"v2", "i0", "i1"} <= reached["scatter-add"]


def test_gather_on_two_indexed_dims_and_partial_windows() -> None:
    x, ids = random_array(8, 4, 4), random_ids(8, 2, below=10, least=-1)
    check_every_strategy(
        lambda x, ids: x.at[ids[:, 0], :, ids[:, 1]].get(mode="fill"),
        x,
        ids,
        kinds=("gather",),
    )
    numbers = lax.GatherDimensionNumbers((1, 2), (0,), (0, 2))
    reached = check_every_strategy(
        lambda x, ids: lax.gather(x, ids, numbers, (1, 4, 3), mode="clip"),
        x,
        ids,
        kinds=("gather",),
    )
    assert reached["gather"] == {"-", "i0", "w1", "v0", "sum0"}


def test_batched_indexing_and_dynamic_slices() -> None:
    x, ids = random_array(4, 8, 2), random_ids(4, 6)

    def lookups(x: jax.Array, ids: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda x, ids: x[ids])(x, ids)
        slices = jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 1))(x, ids[:, 0])
        return rows.sum() + slices.sum()

    check_every_strategy(
        jax.grad(lookups), x, ids, kinds=("gather", "scatter-add"), max_strategies=16
    )
    reached = check_every_strategy(lookups, x, ids, kinds=("gather",))
    assert {"i0", "i1", "w2", "v1"} <= reached["gather"]


def test_booleans_and_keys_are_not_summed() -> None:
    ids = random_ids(4)
    op = operator_of("gather", lambda x, i: x[i], np.ones((8, 4), bool), ids)
    assert set(factor_table(op)) == {"i0", "w1"}
    keys = jax.random.split(jax.random.key(0), 8)
    assert not factor_table(operator_of("gather", lambda k, i: k[i], keys, ids))


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        *(("drop", method) for method in ("set", "add", "multiply", "min", "max")),
        *(("clip", method) for method in ("set", "add")),
        *(slow("clip", method) for method in ("multiply", "min", "max")),
    ],
)
def test_scatters(method: str, mode: str) -> None:
    def update(x: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
        change = getattr(x.at[ids], method)
        return change(updates, mode=mode, wrap_negative_indices=False)

    ids = np.array([3, -9, 3, 12, 7, 0, 5, 5], np.int32)
    kind = {"set": "scatter", "multiply": "scatter-mul"}.get(
        method, f"scatter-{method}"
    )
    reached = check_every_strategy(
        update,
        random_array(8, 4),
        ids,
        random_array(8, 4, seed=1),
        kinds=(kind,),
        max_strategies=16,
    )
    assert {"w1", "v0"} <= reached[kind]
    assert ("i0" in reached[kind]) == (method in ("add", "min", "max"))


def test_scatter_of_one_row_is_linear() -> None:
    reached = check_every_strategy(
        lambda x, row: x.at[3].set(row),
        random_array(8, 4),
        random_array(4),
        kinds=("scatter",),
    )
    assert reached["scatter"] == {"-", "w1", "v0", "sum0,2"}
    ids = random_ids(4)
    many = operator_of("scatter", lambda x: x.at[ids].set(1.0), random_array(8, 4))
    assert "sum0,2" not in factor_table(many)


def test_scatters_of_integers_and_batches() -> None:
    ids = random_ids(4, 6)
    counted = check_every_strategy(
        lambda ids: jnp.zeros(8, jnp.int32).at[ids].add(1), ids, kinds=("scatter-add",)
    )
    assert {"i0", "i1", "v0"} <= counted["scatter-add"]
    batched = check_every_strategy(
        jax.vmap(lambda x, ids, row: x.at[ids].max(row)),
        random_ids(4, 8, below=99),
        ids,
        random_ids(4, 6, below=99, seed=1),
        kinds=("scatter-max",),
    )
    assert {"i0", "i1", "v1"} <= batched["scatter-max"]
    op = operator_of("scatter-max", lambda x: x.at[ids].max(1), np.zeros(8, np.int32))
    assert factor_table(op)["i0"] == ((REPLICATED, 0, 0), (MAX,))
