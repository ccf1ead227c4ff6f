"""Batches of a pipeline, which cuts them into microbatches and places these itself."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.steps.lowered_pipeline import LoweredPipeline

Tree = Any
NUM_EXAMPLES, SIZE, NUM_MICROBATCHES = 48, 16, 2
NUM_INPUTS, WIDTH, NUM_LABELS = 6, 16, 3


def train_step(ws: list[jax.Array], batch: Tree) -> Any:
    """The first stage reads x, the last y, both the scale; z is read whole before."""
    weight = batch["z"] / jnp.sum(batch["z"])

    def loss_fn(ws: list[jax.Array]) -> jax.Array:
        x = batch["x"] * batch["scale"][:, None]
        for w in ws:
            x = jnp.tanh(x @ w)
        error = (x[:, :NUM_LABELS] * batch["scale"][:, None] - batch["y"]) ** 2
        return jnp.sum(weight * jnp.sum(error, 1))

    loss, grads = jax.value_and_grad(loss_fn)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss


def data(number: int = NUM_EXAMPLES) -> Tree:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((number, NUM_INPUTS), np.float32),
        "y": rng.standard_normal((number, NUM_LABELS), np.float32),
        "z": rng.random(number, np.float32) + 1,
        "scale": rng.random(number, np.float32),
        "unread": np.arange(number),
    }


def weights() -> list[jax.Array]:
    rows = NUM_INPUTS, WIDTH, WIDTH, WIDTH
    return [
        jax.random.normal(jax.random.key(i), (n, WIDTH)) for i, n in enumerate(rows)
    ]


def method(num_microbatches: int = NUM_MICROBATCHES) -> autopar.PipelineParallel:
    return autopar.PipelineParallel(num_stages=2, num_microbatches=num_microbatches)


def lowered_step(parallel: Any) -> LoweredPipeline:
    types = {k: jax.ShapeDtypeStruct((SIZE, *v.shape[1:]), v.dtype) for k, v in DATA}
    found = parallel.lower(weights(), types)
    assert isinstance(found, LoweredPipeline)
    return found


DATA = [
    (k, v.astype(jax.dtypes.canonicalize_dtype(v.dtype))) for k, v in data().items()
]


@pytest.fixture(scope="module")
def parallel() -> Any:
    return autopar.parallelize(train_step, method=method())


@pytest.fixture(scope="module")
def lowered(parallel: Any) -> LoweredPipeline:
    return lowered_step(parallel)


def in_turn() -> Iterator[Tree]:
    """An iterator of whole batches, in memory that it uses again."""
    kept = {k: v[:SIZE].copy() for k, v in DATA}
    for first in range(0, NUM_EXAMPLES, SIZE):
        for name, array in DATA:
            kept[name][...] = array[first : first + SIZE]
        yield kept


@pytest.mark.parametrize(("prefetch", "is_iterated"), [(0, False), (2, True)])
def test_steps_on_them_are_those_on_arrays(
    parallel: Any, lowered: LoweredPipeline, prefetch: int, is_iterated: bool
) -> None:
    source = in_turn() if is_iterated else dict(DATA)
    batches = autopar.Batches(source, lowered, prefetch=prefetch)
    placed, whole, single = weights(), weights(), weights()
    for number, batch in zip(range(3), batches, strict=False):
        raw = {k: v[number * SIZE : (number + 1) * SIZE] for k, v in DATA}
        for name, rows in raw.items():
            np.testing.assert_array_equal(batch[name], rows)
        whole, expected = parallel(whole, raw)
        placed, loss = parallel(placed, batch)
        assert float(loss) == float(expected)
        single, on_one = jax.jit(train_step)(single, raw)
        np.testing.assert_allclose(loss, on_one, rtol=1e-5)
    for one, other in zip(placed, whole, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("other", ["microbatches", "one program"])
def test_a_step_planned_otherwise_takes_it(
    lowered: LoweredPipeline, other: str
) -> None:
    batch = next(autopar.Batches(dict(DATA), lowered))
    chosen = method(4) if other == "microbatches" else autopar.DataParallel()
    step = autopar.parallelize(train_step, method=chosen)
    _, loss = step(weights(), batch)
    _, expected = jax.jit(train_step)(weights(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_source_of_other_types_is_refused(lowered: LoweredPipeline) -> None:
    wrong = {**dict(DATA), "y": np.zeros((NUM_EXAMPLES, NUM_LABELS), np.int8)}
    with pytest.raises(ValueError, match="dtypes that the step was planned for.*'y'"):
        next(autopar.Batches(wrong, lowered))


def test_it_goes_on_where_it_was(lowered: LoweredPipeline) -> None:
    def taken(batches: Any, number: int) -> list[Any]:
        return [np.asarray(next(batches)["y"]).tolist() for _ in range(number)]

    whole = taken(autopar.Batches(dict(DATA), lowered, seed=5), 5)
    before = autopar.Batches(dict(DATA), lowered, seed=5)
    found = taken(before, 2)
    after = autopar.Batches(dict(DATA), lowered, seed=5, position=before.position)
    assert found + taken(after, 3) == whole
