"""Batches from a source: right, in place, read ahead, and gone on with where it was."""

import gc
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.steps.lowered_step import Lowered
from tests.marks import slow

Tree = Any
NUM_EXAMPLES, SIZE = 40, 8


def arrays(number: int = NUM_EXAMPLES) -> Tree:
    """All examples; that of number i says so everywhere."""
    x = np.arange(number, dtype=np.float32)
    return {"x": np.repeat(x[:, None], 4, 1), "y": np.arange(number, dtype=np.int32)}


def examples(number: int = NUM_EXAMPLES) -> list[Tree]:
    whole = arrays(number)
    return [{"x": whole["x"][i], "y": whole["y"][i]} for i in range(number)]


def generated(number: int = NUM_EXAMPLES) -> Iterator[Tree]:
    whole = arrays(number)
    for first in range(0, number, SIZE):
        yield {name: array[first : first + SIZE] for name, array in whole.items()}


class Counted:
    """An iterator with a state of its own, as those of grain are."""

    def __init__(self, has_bytes: bool = False) -> None:
        self.number, self.has_bytes = 0, has_bytes

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> Tree:
        if self.number == NUM_EXAMPLES // SIZE:
            raise StopIteration
        self.number += 1
        first = (self.number - 1) * SIZE
        return {n: array[first : first + SIZE] for n, array in arrays().items()}

    def get_state(self) -> Any:
        return str(self.number).encode() if self.has_bytes else {"at": self.number}

    def set_state(self, state: Any) -> None:
        self.number = int(state) if self.has_bytes else state["at"]


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": arrays,
    "jax arrays": lambda: jax.tree.map(jnp.asarray, arrays()),
    "examples": examples,
    "generator": generated,
    "iterator with a state": Counted,
    "iterator with bytes as state": lambda: Counted(has_bytes=True),
}


def train_step(w: jax.Array, batch: Tree) -> tuple[jax.Array, jax.Array]:
    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(w)
    return w - 1e-4 * grad, loss


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    """A step whose plan splits the batch over all devices."""
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    batch = {
        k: jax.ShapeDtypeStruct((SIZE, *v.shape[1:]), v.dtype)
        for k, v in arrays().items()
    }
    found = step.lower(jnp.zeros(4), batch)
    assert isinstance(found, Lowered)
    return found


def numbers(batch: Tree) -> list[int]:
    """Which examples are in a batch."""
    np.testing.assert_array_equal(batch["x"][:, 1], batch["y"])
    return np.asarray(batch["y"]).tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_batches_are_the_examples_in_their_places(
    source: Callable[[], Any], prefetch: int, lowered: Lowered
) -> None:
    by_number = isinstance(source(), dict | list)
    options = {"num_epochs": 1} if by_number else {}
    with autopar.Batches(source(), lowered, prefetch=prefetch, **options) as batches:
        found = list(batches)
    assert sum(map(numbers, found), []) == list(range(NUM_EXAMPLES))
    homes = dict(zip(lowered.program.paths, lowered.program.shardings, strict=True))
    for batch in found:
        assert batch["x"].sharding == homes["batch['x']"]
        assert batch["y"].sharding == homes["batch['y']"]
        assert batch["x"].addressable_shards[0].data.shape == (1, 4)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(
    ("taken", "prefetch"),
    [
        (3, 0),
        (5, 3),
        *(slow(*each) for each in ((0, 0), (0, 3), (3, 3), (5, 0))),
    ],
)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_interrupted_and_gone_on_with_is_uninterrupted(
    source: Callable[[], Any], taken: int, prefetch: int, lowered: Lowered
) -> None:
    by_number = isinstance(source(), dict | list)
    options: Any = {"num_epochs": 2, "seed": 3} if by_number else {}
    options["prefetch"] = prefetch
    whole = list(map(numbers, autopar.Batches(source(), lowered, **options)))
    before = autopar.Batches(source(), lowered, **options)
    found = [numbers(next(before)) for _ in range(taken)]
    time.sleep(0.02)  # to read ahead
    position = before.position
    before.close()
    after = autopar.Batches(source(), lowered, position=position, **options)
    assert after.position == position
    assert found + list(map(numbers, after)) == whole
    assert len(whole) == (10 if by_number else 5)


def test_epochs_are_shuffled_each_otherwise(lowered: Lowered) -> None:
    def epochs(seed: int) -> list[list[int]]:
        batches = autopar.Batches(arrays(), lowered, seed=seed, num_epochs=2)
        found = sum(map(numbers, batches), [])
        return [found[:NUM_EXAMPLES], found[NUM_EXAMPLES:]]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(NUM_EXAMPLES))
    assert first != second and first != sorted(first)
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


def test_batches_cross_epochs_and_none_is_too_small(lowered: Lowered) -> None:
    batches = autopar.Batches(examples(12), lowered, num_epochs=2)
    assert list(map(numbers, batches)) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    endless = autopar.Batches(examples(12), lowered)
    assert [numbers(next(endless)) for _ in range(4)][3][0] == 0


def test_a_larger_batch_goes_on_at_the_same_example(lowered: Lowered) -> None:
    batches = autopar.Batches(arrays(), lowered, seed=1)
    found = sum((numbers(next(batches)) for _ in range(2)), [])
    like = {
        k: jax.ShapeDtypeStruct((12, *v.shape[1:]), v.dtype)
        for k, v in arrays().items()
    }
    larger = autopar.Batches(arrays(), like, seed=1, position=batches.position)
    found += sum((numbers(next(larger)) for _ in range(2)), [])
    assert sorted(found) == list(range(NUM_EXAMPLES))


def test_a_step_takes_the_batch_as_it_lies(lowered: Lowered, caplog: Any) -> None:
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    batch = next(autopar.Batches(arrays(), lowered))
    caplog.set_level("INFO", "autopar")
    w, _ = step(jnp.zeros(4), batch)
    expected, _ = jax.jit(train_step)(jnp.zeros(4), jax.device_get(batch))
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    assert "moved" not in caplog.text


def test_arguments_of_the_batch_come_as_the_step_takes_them() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array, rate: float = 0.1) -> Any:
        return train_step(w, {"x": x, "y": y})[0] * rate

    data = arrays()
    pair = data["x"], data["y"]
    x, y = (jax.ShapeDtypeStruct((SIZE, *a.shape[1:]), a.dtype) for a in pair)
    parallel = autopar.parallelize(step)
    by_position = autopar.Batches(pair, parallel.lower(jnp.zeros(4), x, y))
    assert [leaf.shape for leaf in next(by_position)] == [(SIZE, 4), (SIZE,)]
    by_name = autopar.Batches(data, parallel.lower(jnp.zeros(4), x=x, y=y))
    assert next(by_name).keys() == {"x", "y"}
    with pytest.raises(ValueError, match="by position or by keyword.*1 .*by position"):
        autopar.Batches(data, parallel.lower(jnp.zeros(4), x, y=y))


@pytest.fixture
def grain() -> Any:
    return pytest.importorskip("grain")


class TestGrain:
    def test_a_map_dataset_shuffles_and_repeats_itself(
        self, grain: Any, lowered: Lowered
    ) -> None:
        dataset = grain.MapDataset.source(examples()).shuffle(seed=7).repeat(2)
        batches = autopar.Batches(dataset, lowered, num_epochs=1)
        found = sum(map(numbers, batches), [])
        first, second = found[:NUM_EXAMPLES], found[NUM_EXAMPLES:]
        assert sorted(first) == sorted(second) == list(range(NUM_EXAMPLES))
        assert first != second != sorted(first)
        endless = grain.MapDataset.source(examples()).repeat()
        assert numbers(next(autopar.Batches(endless, lowered))) == [*range(SIZE)]
        with pytest.raises(ValueError, match="shuffle in the source"):
            autopar.Batches(endless, lowered, seed=0)

    def test_a_filter_leaves_holes(self, grain: Any, lowered: Lowered) -> None:
        dataset = grain.MapDataset.source(examples()).filter(lambda x: x["y"] % 2 == 1)
        with pytest.raises(ValueError, match="example 0 is None.*to_iter_dataset"):
            next(autopar.Batches(dataset, lowered))
        batches = autopar.Batches(dataset.to_iter_dataset().batch(SIZE), lowered)
        assert numbers(next(batches)) == list(range(1, 2 * SIZE, 2))

    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize("kind", ["loader", "iterated dataset"])
    def test_its_state_is_kept_and_set(
        self, grain: Any, lowered: Lowered, kind: str, prefetch: int
    ) -> None:
        def source() -> Any:
            if kind == "loader":
                order = {"shuffle": True, "seed": 3, "num_epochs": 1}
                sharding = grain.sharding.NoSharding()
                sampler = grain.samplers.IndexSampler(NUM_EXAMPLES, sharding, **order)
                batch = grain.transforms.Batch(SIZE, drop_remainder=True)
                return grain.DataLoader(
                    data_source=examples(), sampler=sampler, operations=[batch]
                )
            dataset = grain.MapDataset.source(examples()).shuffle(seed=3)
            return dataset.to_iter_dataset().batch(SIZE)

        options: Any = {"prefetch": prefetch}
        whole = list(map(numbers, autopar.Batches(source(), lowered, **options)))
        assert sorted(sum(whole, [])) == list(range(NUM_EXAMPLES))
        before = autopar.Batches(source(), lowered, **options)
        found = [numbers(next(before)) for _ in range(2)]
        position = json.loads(json.dumps(before.position))
        assert "state" in position
        after = autopar.Batches(source(), lowered, position=position, **options)
        assert found + list(map(numbers, after)) == whole


def test_a_source_may_use_its_memory_again(lowered: Lowered) -> None:
    def in_one_buffer() -> Iterator[Tree]:
        buffer = {name: array[:SIZE].copy() for name, array in arrays().items()}
        for batch in generated():
            for name, array in batch.items():
                buffer[name][...] = array
            yield buffer

    batches = autopar.Batches(in_one_buffer(), lowered, prefetch=4)
    time.sleep(0.05)  # to read ahead
    assert sum(map(numbers, batches), []) == list(range(NUM_EXAMPLES))


class TestErrors:
    def test_what_the_source_raises_comes_with_its_traceback(
        self, lowered: Lowered
    ) -> None:
        def broken() -> Iterator[Tree]:
            yield from list(generated())[:1]
            raise KeyError("no such file")

        batches = autopar.Batches(broken(), lowered)
        assert numbers(next(batches)) == list(range(SIZE))
        with pytest.raises(KeyError, match="no such file") as caught:
            next(batches)
        frames = [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
        ]
        assert "broken" in frames
        with pytest.raises(StopIteration):
            next(batches)

    def test_a_source_shorter_than_a_batch(self, lowered: Lowered) -> None:
        with pytest.raises(ValueError, match="takes 8 examples, but the source has 7"):
            autopar.Batches(examples(7), lowered)

    def test_a_source_shorter_than_the_position(self, lowered: Lowered) -> None:
        with pytest.raises(ValueError, match="behind the 7 batches .* ended after 5"):
            autopar.Batches(generated(), lowered, position={"batches": 7})

    def test_a_last_batch_that_is_smaller(self, lowered: Lowered) -> None:
        batches = autopar.Batches(generated(12), lowered)
        next(batches)
        with pytest.raises(ValueError, match=r"\[4, 4\] and not \[8, 4\]; .*leave out"):
            next(batches)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda b: {"x": b["x"]}, "trees like the batch of the step"),
            (
                lambda b: {**b, "x": b["x"][:, :3]},
                r"'x'\] is \[8, 3\] and not \[8, 4\]",
            ),
            (lambda b: {**b, "y": b["y"] + 0.5}, r"'y'\] is float64 and not int32"),
            (lambda b: {**b, "y": np.int32(1)}, r"'y'\] is \[\] and not \[8\]"),
        ],
    )
    def test_other_batches(
        self, change: Callable[[Tree], Tree], message: str, lowered: Lowered
    ) -> None:
        batches = autopar.Batches(map(change, generated()), lowered)
        with pytest.raises(ValueError, match=message):
            next(batches)

    def test_examples_of_different_shapes(self, lowered: Lowered) -> None:
        uneven = examples()
        uneven[3] = {**uneven[3], "x": np.zeros(5, "f4")}
        with pytest.raises(ValueError, match=r"have one shape, but batch\['x'\] does"):
            next(autopar.Batches(uneven, lowered))

    def test_arrays_of_different_lengths(self, lowered: Lowered) -> None:
        with pytest.raises(ValueError, match=r"same examples .* \[39, 40\] long"):
            autopar.Batches({**arrays(), "y": np.arange(39)}, lowered)

    @pytest.mark.parametrize(
        ("source", "position"),
        [
            (arrays, {"batches": 3}),
            (arrays, {"samples": 8, "of": 41, "seed": None}),
            (arrays, {"samples": 8, "of": 40, "seed": 1}),
            (generated, {"samples": 8, "of": 40, "seed": None}),
            (Counted, {"batches": 3}),
            (generated, {"batches": 3, "state": {"at": 3}}),
        ],
    )
    def test_positions_of_another_source(
        self, source: Callable[[], Any], position: Any, lowered: Lowered
    ) -> None:
        with pytest.raises(ValueError, match="goes on at a position of its own"):
            autopar.Batches(source(), lowered, position=position)

    def test_no_source(self, lowered: Lowered) -> None:
        with pytest.raises(
            TypeError, match="or is iterated for batches, but got a int"
        ):
            autopar.Batches(3, lowered)

    def test_shuffling_an_iterator(self, lowered: Lowered) -> None:
        with pytest.raises(ValueError, match=r"seed= and num_epochs= are for"):
            autopar.Batches(generated(), lowered, seed=0)

    def test_leaves_without_a_leading_size(self) -> None:
        with pytest.raises(ValueError, match="have one leading size"):
            autopar.Batches(arrays(), {"x": jax.ShapeDtypeStruct((), "f4")})


def reading_threads() -> int:
    return sum(thread.name == "autopar batches" for thread in threading.enumerate())


@pytest.mark.parametrize("end", ["close", "forget"])
def test_no_thread_is_left(end: str, lowered: Lowered) -> None:
    gc.freeze()  # nothing older is collected, which takes seconds
    before = reading_threads()
    batches: Any = autopar.Batches(arrays(), lowered)
    next(batches)
    assert reading_threads() == before + 1
    if end == "close":
        batches.close()
    del batches
    gc.collect()
    assert reading_threads() == before
