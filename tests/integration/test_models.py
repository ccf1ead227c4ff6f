"""Every model of the zoo trains as it does on one device, however it is split.

Each case runs three steps under plain `jax.jit` and three on eight devices. Small
batches on the larger meshes leave the planner no choice but to split more than the
batch.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.steps.lowered_step import Compiled
from benchmarks.models import bert, gpt, lstm, mlp, moe, resnet, t5, unet, vit
from benchmarks.models.optimizers import make_optimizer
from benchmarks.models.training import make_workload
from benchmarks.models.workload import Batch, Model, TrainState

RTOL = 2e-4
ATOL = 2e-6  # of the largest element of the leaf
NUM_STEPS = 3

MODELS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "mlp": (mlp, {"num_layers": 3}),
    "gpt": (gpt, {"num_layers": 1}),
    "gpt-scan": (gpt, {"num_layers": 2, "scan_layers": True, "remat": True}),
    "lstm": (lstm, {"num_layers": 1}),
    "bert": (bert, {"num_layers": 1}),
    "t5": (t5, {}),
    "vit": (vit, {"num_layers": 1}),
    "resnet": (resnet, {}),
    "wide-resnet": (resnet, {"block": "bottleneck", "width_factor": 2}),
    "moe": (moe, {}),
    "unet": (unet, {"num_levels": 1, "image_size": 8}),
    "unet-3d": (unet, {"num_levels": 1, "image_size": 8, "num_dims": 3}),
}
# Steps at the usual rates turn rounding errors of these into other states.
LEARNING_RATES = {"wide-resnet": 1e-3, "unet-3d": 1e-3}
HAS_DROPOUT = ("gpt", "gpt-scan", "bert")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "adamw_clip")
BATCH_SIZE_BY_MESH = {"x:8": 16, "x:2;y:4": 2, "x:2;y:2;z:2": 4}


@dataclass(frozen=True)
class Case:
    """One model, mesh and optimizer; prints as its test id."""

    model: str
    mesh: str
    optimizer: str
    dropout: bool

    def __str__(self) -> str:
        sizes = "x".join(part[2:] for part in self.mesh.split(";"))
        words = [self.model, sizes, self.optimizer, *["dropout"] * self.dropout]
        return "-".join(words)

    def make_model(self) -> Model:
        module, options = MODELS[self.model]
        config = replace(
            module.Config.tiny(), batch_size=BATCH_SIZE_BY_MESH[self.mesh], **options
        )
        if self.dropout:
            config = replace(config, dropout=0.1)
        return module.make_model(config)


def every_case() -> Iterator[Case]:
    """The full product."""
    for names in itertools.product(MODELS, BATCH_SIZE_BY_MESH, OPTIMIZERS):
        yield Case(*names, dropout=False)
        if names[0] in HAS_DROPOUT:
            yield Case(*names, dropout=True)


# Of the others, test_varied_steps.py has a Llama, a U-Net and experts that are quick.
QUICK = (
    Case("mlp", "x:8", "adafactor", dropout=False),
    Case("mlp", "x:2;y:4", "sgd", dropout=False),
)


@dataclass(frozen=True)
class Training:
    """The states after three steps, on one device and on eight.

    `expected` and `noise` are numpy leaves: what `jax.jit` returns, and how far each
    element of it moves under perturbations of the size of rounding errors.
    """

    compiled: Compiled
    state: TrainState
    losses: Sequence[float]
    expected: Sequence[np.ndarray]
    noise: Sequence[np.ndarray]


def train(case: Case) -> Training:
    model = case.make_model()
    optimizer = make_optimizer(case.optimizer, LEARNING_RATES.get(case.model))
    workload = make_workload(str(case), model, optimizer)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    expected, noise = on_one_device(model, optimizer, state, batch)
    step = autopar.parallelize(workload.step, mesh=case.mesh)
    compiled = step.lower(state, batch).compile()
    losses: list[float] = []
    for _ in range(NUM_STEPS):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    return Training(compiled, state, losses, expected, noise)


def host_leaves(state: TrainState) -> Sequence[np.ndarray]:
    return [np.asarray(key_data(leaf)) for leaf in jax.tree.leaves(state)]


def key_data(leaf: jax.Array) -> jax.Array:
    """The bits of a PRNG key; any other array as it is."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def on_one_device(
    model: Model,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """The state after the steps, and how far it moves when arithmetic is a little off.

    Some values are noise and nothing else: the true gradient of an attention key's bias
    is zero, and Adam makes a full step of what rounding leaves of it. So the reference
    itself is run again, from parameters that are off by one in a million, with
    gradients off by as much as another order of summation makes them: 1e-7 of the
    largest, and nothing where only zeros are summed.
    """

    @jax.jit
    def noisy_step(state: TrainState, batch: Batch, noise: Any) -> Any:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            off = jax.tree.map(
                lambda g, z: g + 1e-7 * abs(g).max() * z * (g != 0), updates, noise
            )
            return optimizer.update(off, state, params)

        noisy = optax.GradientTransformation(optimizer.init, update)
        return make_workload("noisy", model, noisy).step(state, batch)

    def run(draw: Callable[[jax.Array], np.ndarray]) -> Sequence[np.ndarray]:
        params = jax.tree.map(
            lambda p: np.asarray(p) * (1 + np.float32(1e-6) * draw(p)), state.params
        )
        after = state._replace(params=params)
        for _ in range(NUM_STEPS):
            after, _ = noisy_step(after, batch, jax.tree.map(draw, state.params))
        return host_leaves(after)

    def rerun(seed: int) -> Sequence[np.ndarray]:
        generator = np.random.default_rng(seed)
        return run(lambda like: generator.standard_normal(like.shape, np.float32))

    expected = run(lambda like: np.zeros(like.shape, np.float32))
    reruns = [rerun(seed) for seed in range(4)]
    noise = [
        np.max([abs(leaf - value) for leaf in leaves], axis=0)
        if value.dtype.kind == "f"
        else np.zeros(value.shape)
        for value, *leaves in zip(expected, *reruns, strict=True)
    ]
    return expected, noise


def tolerance(expected: np.ndarray) -> np.ndarray:
    scale = abs(expected).max(initial=0.0)
    return RTOL * abs(expected) + ATOL * scale


def noise_allowance(noise: np.ndarray) -> np.ndarray:
    """Ten times the noise; an element that happened to stay still gets the median.

    A square that is within it is that of a gradient that is noise and nothing else:
    ten times such a gradient is a hundred times its square.
    """
    return 10 * np.maximum(noise, np.median(noise))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in every_case()
    ],
    ids=str,
)
def training(request: pytest.FixtureRequest) -> Training:
    return train(request.param)


def test_the_state_after_three_steps_is_that_of_one_device(training: Training) -> None:
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(training.state),
        host_leaves(training.state),
        training.expected,
        training.noise,
        strict=True,
    )
    for (path, _), actual, expected, noise in leaves:
        name = jax.tree_util.keystr(path)
        assert actual.dtype == expected.dtype, name
        if expected.dtype.kind != "f":
            np.testing.assert_array_equal(actual, expected, err_msg=name)
            continue
        off = noise_allowance(noise)
        if re.search(r"\.(nu|v|v_row|v_col)\[", name):  # squares of gradients
            off = np.where(expected <= off, 10 * off, off)
        allowed = tolerance(expected) + off
        excess = (abs(actual - expected) / (allowed + 1e-30)).max()
        assert excess <= 1, f"{name} is {excess:.3g} times its tolerance off"


def test_the_loss_falls(training: Training) -> None:
    assert np.isfinite(training.losses).all()
    assert training.losses[-1] < training.losses[0]


def test_few_elements_are_noise(training: Training) -> None:
    """Nine tenths of the state are held to two percent, and far less as a rule."""
    judged = [
        noise_allowance(noise) <= 0.02 * (abs(expected) + abs(expected).max())
        for expected, noise in zip(training.expected, training.noise, strict=True)
        if expected.dtype.kind == "f"
    ]
    assert np.concatenate([each.ravel() for each in judged]).mean() > 0.9


def test_the_program_holds_the_planned_collectives(training: Training) -> None:
    training.compiled.audit().raise_if_wrong()


def test_no_two_devices_compute_the_same(training: Training) -> None:
    assert training.compiled.plan.predicted.split_flops_fraction >= 0.99


def test_each_device_holds_the_bytes_the_specs_say(training: Training) -> None:
    sharding = training.compiled.plan.sharding
    leaves = jax.tree.leaves(training.state)
    for leaf, planned in zip(leaves, sharding.inputs[: len(leaves)], strict=True):
        assert planned.role == "state", planned.path
        shards = key_data(leaf).addressable_shards
        held = [shard.data.nbytes for shard in shards]
        assert held == [planned.bytes] * sharding.mesh.size, planned.path
