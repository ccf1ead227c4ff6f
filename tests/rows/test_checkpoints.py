"""DT-8 and ZER-7: state that goes on elsewhere, by shard, and weights as a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import autopar
from tests.safetensors_file import read_safetensors

Tree = Any
OPTIMIZER = optax.adam(1e-2, eps=1e-2)
WIDTH, BATCH, NUM_EXAMPLES = 128, 16, 48


def init(key: jax.Array) -> Tree:
    keys = jax.random.split(key, 4)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys]
    return params, OPTIMIZER.init(params)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    params, moments = state

    def loss_fn(params: list[jax.Array]) -> jax.Array:
        hidden = batch["x"]
        for kernel in params:
            hidden = jnp.tanh(hidden @ kernel)
        return jnp.mean((hidden - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = OPTIMIZER.update(grads, moments)
    return (optax.apply_updates(params, updates), moments), loss


def data() -> Tree:
    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_EXAMPLES, WIDTH), "f4")
    return {"x": x, "y": random.standard_normal((NUM_EXAMPLES, WIDTH), "f4")}


ABSTRACT = {name: jax.ShapeDtypeStruct((BATCH, WIDTH), "f4") for name in "xy"}
KEY = jax.random.key(0)


def abstract_state(step: Any) -> Tree:
    return step.abstract_state(init, KEY, batch=ABSTRACT)


def batches_of(step: Any, position: Any = None) -> autopar.Batches:
    lowered = step.lower(abstract_state(step), ABSTRACT)
    return autopar.Batches(data(), lowered, seed=5, position=position)


def train(
    step: Any, state: Tree, batches: Iterator[Tree], number: int
) -> tuple[Tree, list[float]]:
    losses = []
    for _ in range(number):
        state, loss = step(state, next(batches))
        losses.append(float(loss))
    return state, losses


STEPS: dict[str, Any] = {
    "data parallel": {"mesh": "data:8", "method": autopar.DataParallel()},
    "4 x 2": {"mesh": "data:4;model:2", "method": autopar.Megatron(tensor=2)},
    "2 x 2 x 2": {"mesh": "x:2;y:2;z:2"},
    "ZeRO": {"mesh": "data:8", "method": autopar.Zero(stage=3)},
    "two stages": {"method": autopar.PipelineParallel(2, num_microbatches=2)},
    "one device": {"mesh": "one"},
}


def parallel(name: str) -> Any:
    options = dict(STEPS[name])
    if options.get("mesh") == "one":
        options["mesh"] = Mesh(np.array(jax.devices()[:1]), ("x",))
    return autopar.parallelize(train_step, **options)


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    """Losses of six steps on one device, with the examples in their shuffled order."""
    batches = autopar.Batches(data(), ABSTRACT, seed=5)
    return train(jax.jit(train_step), jax.jit(init)(KEY), batches, 6)[1]


@pytest.fixture(scope="module")
def after_two_steps(
    uninterrupted: list[float], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of two steps with data parallelism on eight devices."""
    step = parallel("data parallel")
    batches = batches_of(step)
    state = step.init(init, KEY, batch=ABSTRACT)
    state, losses = train(step, state, batches, 2)
    np.testing.assert_allclose(losses, uninterrupted[:2], rtol=1e-5)
    directory = tmp_path_factory.mktemp("run")
    with autopar.Checkpoints(directory) as checkpoints:
        checkpoints.save(2, state, data_position=batches.position)
    return directory


def go_on(
    name: str, directory: Path, number: int
) -> tuple[Tree, list[float], autopar.Batches]:
    """The state and losses of some steps from the newest checkpoint on."""
    step = parallel(name)
    with autopar.Checkpoints(directory) as checkpoints:
        found = checkpoints.restore(abstract_state(step))
    batches = batches_of(step, found.data_position)
    return *train(step, found.state, batches, number), batches


@pytest.mark.parametrize("name", ["4 x 2", "ZeRO", "two stages", "one device"])
def test_dt_8_training_goes_on_elsewhere(
    name: str, after_two_steps: Path, uninterrupted: list[float]
) -> None:
    _, losses, _ = go_on(name, after_two_steps, 4)
    np.testing.assert_allclose(losses, uninterrupted[2:], rtol=1e-5)


def test_dt_8_and_from_there_on_a_third_mesh(
    after_two_steps: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    state, losses, batches = go_on("4 x 2", after_two_steps, 2)
    with autopar.Checkpoints(tmp_path, files="shard") as checkpoints:
        checkpoints.save(4, state, data_position=batches.position)
    losses += go_on("2 x 2 x 2", tmp_path, 2)[1]
    np.testing.assert_allclose(losses, uninterrupted[2:], rtol=1e-5)


@pytest.mark.parametrize("files", ["process", "shard"])
@pytest.mark.parametrize("name", ["data parallel", "4 x 2", "ZeRO"])
def test_dt_8_files_are_one_copy(name: str, files: Any, tmp_path: Path) -> None:
    state = parallel(name).init(init, KEY, batch=ABSTRACT)
    random = np.random.default_rng(0)  # moments of zeros would be compressed
    state = jax.tree.map(
        lambda x: jax.device_put(random.standard_normal(x.shape, "f4"), x.sharding),
        state,
    )
    with autopar.Checkpoints(tmp_path, files=files) as checkpoints:
        checkpoints.save(0, state)
    one_copy = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    in_files = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert 0.8 * one_copy < in_files < 1.05 * one_copy


@pytest.mark.parametrize("name", ["data parallel", "4 x 2", "ZeRO"])
def test_dt_8_a_file_holds_a_shard_of_one_device(name: str, tmp_path: Path) -> None:
    """What a device holds is a multiple of a file, and each file is written once."""
    state = parallel(name).init(init, KEY, batch=ABSTRACT)
    with autopar.Checkpoints(tmp_path, files="shard") as checkpoints:
        checkpoints.save(0, state)
    for index, leaf in enumerate(state[0]):
        folder = tmp_path / "0" / f"0.{index}"
        described = json.loads((folder / ".zarray").read_text())
        assert described["shape"] == [WIDTH, WIDTH]
        held, chunk = leaf.addressable_shards[0].data.shape, described["chunks"]
        assert all(a % b == 0 for a, b in zip(held, chunk, strict=True))
        number = WIDTH**2 // np.prod(chunk)
        parts = [path for path in folder.iterdir() if path.name != ".zarray"]
        assert len(parts) == number == 8


def test_zer_7_exported_weights_are_those_gathered(tmp_path: Path) -> None:
    """Of weights in eight shards, after two steps."""
    step = parallel("ZeRO")
    state = step.init(init, KEY, batch=ABSTRACT)
    state, _ = train(step, state, batches_of(step), 2)
    params = state[0]
    assert all(p.addressable_shards[0].data.nbytes * 8 == p.nbytes for p in params)
    autopar.export_weights(tmp_path / "weights.safetensors", params)
    found = read_safetensors(tmp_path / "weights.safetensors")
    assert list(found) == ["0", "1", "2", "3"]
    for name, array in found.items():
        assert array.dtype == np.float32
        assert array.tobytes() == np.asarray(params[int(name)]).tobytes()
