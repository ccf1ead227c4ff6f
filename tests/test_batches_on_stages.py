"""Batches of a pipeline: each microbatch lies on the stages that read it, ahead."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.state.examples import stage_rows
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


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("is_iterated", [False, True])
def test_microbatches_lie_where_stages_read_them(
    lowered: LoweredPipeline, prefetch: int, is_iterated: bool
) -> None:
    source = in_turn() if is_iterated else dict(DATA)
    batches = autopar.Batches(source, lowered, prefetch=prefetch)
    shardings = lowered.step.pipeline.program.shardings
    for number, batch in zip(range(3), batches, strict=False):
        read: dict[str, list[int]] = {}
        for name, array in DATA:
            rows = array[number * SIZE : (number + 1) * SIZE]
            np.testing.assert_array_equal(np.asarray(batch[name]), rows)
            found = stage_rows(batch[name])
            assert found is not None
            assert found.shape == rows.shape and found.dtype == rows.dtype
            read[name] = sorted(found.parts[0])
            for m, part in enumerate(found.parts):
                for stage, lying in part.items():
                    home = shardings[f"batch['{name}']", stage]
                    assert lying.committed
                    assert lying.sharding.is_equivalent_to(home, lying.ndim)
                    np.testing.assert_array_equal(lying, rows[m::NUM_MICROBATCHES])
        assert read["x"] == [0] and read["y"] == [1] and read["scale"] == [0, 1]
        assert not read["unread"]


def test_a_step_copies_nothing_of_a_batch_and_gives_the_same_bits(
    parallel: Any, lowered: LoweredPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = autopar.Batches(dict(DATA), lowered, prefetch=0)
    placed, whole = weights(), weights()
    single = weights()
    for number in range(3):
        batch = next(batches)
        raw = {k: v[number * SIZE : (number + 1) * SIZE] for k, v in DATA}
        whole, expected = parallel(whole, raw)
        moved: list[int] = []
        with monkeypatch.context() as patch:
            _note_copies(patch, moved)
            placed, loss = parallel(placed, batch)
        microbatch = SIZE // NUM_MICROBATCHES
        leaves = [microbatch * n * 4 for n in (NUM_INPUTS, NUM_LABELS, 1)]
        assert moved and not {*leaves} & {*moved}, "activations are sent, no leaf"
        assert float(loss) == float(expected)
        single, on_one = jax.jit(train_step)(single, raw)
        np.testing.assert_allclose(loss, on_one, rtol=1e-5)
    for one, other in zip(placed, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def _note_copies(patch: pytest.MonkeyPatch, moved: list[int]) -> None:
    put = jax.device_put

    def noted(tree: Any, *args: Any, **kwargs: Any) -> Any:
        moved.extend(np.asarray(x).nbytes for x in jax.tree.leaves(tree))
        return put(tree, *args, **kwargs)

    patch.setattr(jax, "device_put", noted)


def test_a_batch_may_be_taken_twice_and_looked_at(
    parallel: Any, lowered: LoweredPipeline
) -> None:
    batch = next(autopar.Batches(dict(DATA), lowered, seed=3))
    losses = [float(parallel(weights(), batch)[1]) for _ in range(2)]
    assert losses[0] == losses[1]
    fetched = autopar.fetch(batch)
    assert losses[0] == float(parallel(weights(), fetched)[1])
    assert jnp.asarray(batch["x"]).shape == (SIZE, NUM_INPUTS)


@pytest.mark.parametrize("other", ["microbatches", "one program"])
def test_a_step_planned_otherwise_takes_it(
    lowered: LoweredPipeline, other: str
) -> None:
    batch = next(autopar.Batches(dict(DATA), lowered))
    chosen = method(4) if other == "microbatches" else autopar.DataParallel()
    step = autopar.parallelize(train_step, method=chosen)
    _, loss = step(weights(), batch)
    _, expected = jax.jit(train_step)(weights(), autopar.fetch(batch))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_deleted_batch_is_refused(parallel: Any, lowered: LoweredPipeline) -> None:
    batch = next(autopar.Batches(dict(DATA), lowered))
    batch["x"].delete()
    with pytest.raises(ValueError, match="donated once.*batch.'x'"):
        parallel(weights(), batch)


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
