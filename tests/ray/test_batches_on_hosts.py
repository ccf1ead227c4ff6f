"""Hosts read the examples that their devices hold, and the driver reads none."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.errors import WorkerError
from autopar.runtime.ray_local import LocalHosts
from autopar.runtime.ray_workers import workers_of
from tests.marks import slow

NUM_EXAMPLES, SIZE, WIDTH = 64, 16, 8
BATCH = {
    "x": jax.ShapeDtypeStruct((SIZE, WIDTH), "f4"),
    "y": jax.ShapeDtypeStruct((SIZE,), "f4"),
}
Read = dict[int, Counter[int]]


def values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_EXAMPLES, WIDTH), "f4")
    return {"x": x, "y": random.standard_normal(NUM_EXAMPLES).astype("f4")}


def examples(folder: Path, broken: int = -1) -> Any:
    """A source that notes which process reads which example."""
    data = values()

    class Examples:  # hosts cannot import this file: it is sent by value
        def __len__(self) -> int:
            return NUM_EXAMPLES

        def __getitem__(self, number: int) -> dict[str, np.ndarray]:
            if number == broken:
                raise OSError("a file is damaged")
            with open(folder / str(os.getpid()), "a") as file:
                file.write(f"{number}\n")
            return {name: array[number] for name, array in data.items()}

    return Examples()


def arrays(folder: Path) -> Any:
    """A source for each leaf, which note who reads which rows."""

    class Rows:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.shape, self.ndim = array, array.shape, array.ndim

        def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
            with open(folder / f"{os.getpid()}_{self.ndim}", "a") as file:
                file.writelines(f"{number}\n" for number in numbers)
            return self.array[numbers]

    return {name: Rows(array) for name, array in values().items()}


def read_by(folder: Path, leaf: str = "") -> Read:
    """How often each process read each example."""
    return {
        int(file.name.removesuffix(leaf)): Counter(map(int, file.read_text().split()))
        for file in folder.glob(f"*{leaf}")
    }


def init(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    up = jax.random.normal(first, (WIDTH, 32)) / 3
    return {"up": up, "down": jax.random.normal(second, (32,)) / 6}


def train_step(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": loss}


def losses_of_one_device(num_steps: int, seed: int | None) -> list[float]:
    state, losses = init(jax.random.key(0)), []
    batches = autopar.Batches(values(), BATCH, seed=seed)
    for _ in range(num_steps):
        state, metrics = jax.jit(train_step)(state, next(batches))
        losses.append(float(metrics["loss"]))
    return losses


def losses_of(step: Any, source: Any, **options: Any) -> list[float]:
    state = step.init(init, jax.random.key(0), batch=BATCH)
    batches = autopar.Batches(source, step.lower(state, BATCH), **options)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def process_ids(cluster: Cluster, num_hosts: tuple[int, ...]) -> list[int]:
    return [facts.process_id for facts in workers_of(cluster, num_hosts).facts]


def wait_for_death_of_one(processes: list[int]) -> None:
    end = time.monotonic() + 30
    while all(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < end, "the processes of a killed host live"
        time.sleep(0.05)


@pytest.mark.parametrize("seed", [slow(None), 5])
def test_each_example_is_read_once_by_who_holds_it(
    ray_cluster: Cluster, tmp_path: Path, seed: int | None
):
    method = autopar.DataParallel()
    step = autopar.parallelize(train_step, method=method, cluster=ray_cluster)
    losses = losses_of(step, examples(tmp_path), seed=seed, num_epochs=1)
    expected = losses_of_one_device(NUM_EXAMPLES // SIZE, seed)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    read = read_by(tmp_path)
    assert sum(read.values(), Counter()) == Counter(range(NUM_EXAMPLES))
    assert sorted(read) == sorted(process_ids(ray_cluster, (2,))), "and not this one"
    assert [each.total() for each in read.values()] == [NUM_EXAMPLES // 2] * 2


def test_a_dataset_of_grain_is_read_by_hosts(ray_cluster: Cluster, tmp_path: Path):
    """Its own shuffling, and a position from which fresh workers go on."""
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(examples(tmp_path)).shuffle(seed=2)
    dataset = dataset.map(lambda each: {**each, "y": 2 * each["y"]})
    order = [float(dataset[i]["y"]) for i in range(NUM_EXAMPLES)]
    for file in tmp_path.iterdir():
        file.unlink()  # this process has read all
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    step = autopar.parallelize(train_step, method=method, cluster=ray_cluster)
    lowered = step.lower(jax.eval_shape(init, jax.random.key(0)), BATCH)
    state, found, position = step.init(init, jax.random.key(0), batch=BATCH), [], None
    for _ in range(2):
        batches = autopar.Batches(dataset, lowered, num_epochs=1, position=position)
        for _ in range(2):
            batch = next(batches)
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        position = batches.position
    assert sorted(read_by(tmp_path)) == sorted(process_ids(ray_cluster, (1, 1)))
    on_one = init(jax.random.key(0))
    for number, loss in enumerate(found):
        rows = slice(number * SIZE, (number + 1) * SIZE)
        given = [dataset[i] for i in range(NUM_EXAMPLES)[rows]]
        whole = jax.tree.map(lambda *each: np.stack(each), *given)
        np.testing.assert_array_equal(whole["y"], order[rows])
        on_one, expected = jax.jit(train_step)(on_one, whole)
        np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)


def test_stages_read_what_they_use(ray_cluster: Cluster, tmp_path: Path):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    step = autopar.parallelize(train_step, method=method, cluster=ray_cluster)
    losses = losses_of(step, arrays(tmp_path), seed=3, num_epochs=1)
    expected = losses_of_one_device(NUM_EXAMPLES // SIZE, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    first, last = process_ids(ray_cluster, (1, 1))
    once = Counter(range(NUM_EXAMPLES))
    assert read_by(tmp_path, "_2") == {first: once}, "inputs"
    assert read_by(tmp_path, "_1") == {last: once}, "labels"


def test_a_batch_can_be_looked_at_and_taken_twice(ray_cluster: Cluster, tmp_path: Path):
    method = autopar.DataParallel()
    step = autopar.parallelize(train_step, method=method, cluster=ray_cluster)
    state = step.init(init, jax.random.key(0), batch=BATCH)
    batches = autopar.Batches(examples(tmp_path), step.lower(state, BATCH))
    next(batches)
    batch = next(batches)
    assert isinstance(batch["x"], autopar.DistributedArray)
    here = autopar.fetch(batch)
    np.testing.assert_array_equal(here["x"], values()["x"][SIZE : 2 * SIZE])
    again, expected = state, init(jax.random.key(0))
    for _ in range(2):
        again, _ = step(again, batch)
        expected, _ = jax.jit(train_step)(expected, here)
    np.testing.assert_allclose(autopar.fetch(again)["up"], expected["up"], rtol=1e-5)
    workers = workers_of(ray_cluster, (2,))
    assert len(workers.sources) == 1
    del batches, batch
    assert not workers.sources, "the hosts forget it"


@pytest.mark.slow  # a host more starts, and Ray takes seconds to give it up
def test_a_training_goes_on_at_the_right_example_with_fewer_hosts(
    ray_hosts: LocalHosts, tmp_path: Path
):
    num_steps, third = 8, ray_hosts.add()
    cluster = Cluster.ray(ray_hosts.address, num_hosts=3)
    like = {
        n: jax.ShapeDtypeStruct((24, *k.shape[1:]), k.dtype) for n, k in BATCH.items()
    }
    notes, kept = tmp_path / "notes", tmp_path / "kept"
    notes.mkdir()
    source, got = examples(notes), dict[int, float]()

    def batches(position: Any) -> autopar.Batches:
        return autopar.Batches(source, like, position=position, seed=1, on_hosts=True)

    expected, state = list[float](), init(jax.random.key(0))
    reference = autopar.Batches(values(), like, seed=1)
    for _ in range(num_steps):
        state, metrics = jax.jit(train_step)(state, next(reference))
        expected.append(float(metrics["loss"]))
    with autopar.Checkpoints(kept) as checkpoints:
        step = autopar.parallelize(
            train_step, method=autopar.DataParallel(), cluster=cluster
        )
        training = autopar.Training(
            *(step, checkpoints, init, jax.random.key(0)),
            batches=batches,
            save_every=2,
        )
        for number, metrics in training.run(num_steps):
            got[number] = float(metrics["loss"])
            if number == 4 and not training.recoveries:
                checkpoints.wait()  # that of step 3 is there
                workers = process_ids(cluster, (3,))
                ray_hosts.kill(third)
                wait_for_death_of_one(workers)  # the steps left take less than that
        assert training.recoveries[-1].num_hosts == 2
        assert training.recoveries[-1].from_step >= 4
        found = checkpoints.restore(training._places())
        assert found.data_position == {"samples": 24 * 8, "of": NUM_EXAMPLES, "seed": 1}
        training.step.close()
    np.testing.assert_allclose([got[i] for i in range(num_steps)], expected, rtol=1e-5)
    assert os.getpid() not in read_by(notes)


@pytest.mark.slow  # other workers start for the tests behind it
def test_an_error_of_a_source_names_host_and_example(
    ray_cluster: Cluster, tmp_path: Path
):
    method = autopar.DataParallel()
    step = autopar.parallelize(train_step, method=method, cluster=ray_cluster)
    told = r"host 1 at \S+ raised in 'step': OSError: a file is damaged.* example 11"
    with pytest.raises(WorkerError, match=told):
        losses_of(step, examples(tmp_path, broken=11))
