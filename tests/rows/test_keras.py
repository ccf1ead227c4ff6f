"""Rows of Keras: layouts by the paths of its weights, in a training loop of one's own.

Keras is optional; a step of its stateless calls is a step of plain dicts.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Case, random
from tests.rows.named_plans import plan_of_layout
from tests.rows.running import homes, run_as_planned, traffic

keras = pytest.importorskip("keras")

MESH = "batch:2;model:4"
BATCH, HIDDEN, CLASSES = 64, 128, 16
# A layout for each weight; its Adam slots have its path with underscores.
LAYOUTS = {
    r"dense.kernel": P(None, "model"),
    r"dense.bias": P("model"),
    r"dense_1.kernel": P("model", None),
    r"dense_1.bias": P(),
    r"^(x|y)$": P("batch"),
}


def layers() -> list[Any]:
    """Flatten, Dense 128 and the head of 16 classes, for images of 28 x 28."""
    return [
        keras.layers.Flatten(),
        keras.layers.Dense(HIDDEN, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]


def sequential() -> Any:
    return keras.Sequential([keras.layers.Input((28, 28)), *layers()])


def functional() -> Any:
    inputs = x = keras.layers.Input((28, 28))
    for layer in layers():
        x = layer(x)
    return keras.Model(inputs, x)


def subclassed() -> Any:
    class Classifier(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.flatten, self.dense, self.head = layers()

        def call(self, x: jax.Array, training: bool = False) -> jax.Array:
            return self.head(self.dense(self.flatten(x)))

    model = Classifier()
    model(jnp.zeros((1, 28, 28)))
    return model


def classifier(make_model: Callable[[], Any], rate: float = 0.01) -> Case:
    """One step of Adam with the accuracy's state; every value by its Keras path."""
    keras.utils.clear_session()  # layer names start from their first again
    keras.utils.set_random_seed(0)
    model, optimizer = make_model(), keras.optimizers.Adam(rate, epsilon=1e-2)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    groups = model.trainable_variables, optimizer.variables, accuracy.variables
    weights, slots, counts = ([v.path for v in group] for group in groups)

    def step(
        state: dict[str, jax.Array], x: jax.Array, y: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits, _ = model.stateless_call(params, [], x, training=True)
            return loss_of(y, logits), logits

        params = [state[path] for path in weights]
        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        params, moments = optimizer.stateless_apply(
            [state[path] for path in slots], grads, params
        )
        totals = accuracy.stateless_update_state(
            [state[path] for path in counts], y, logits
        )
        new = [*params, *moments, *totals]
        return dict(zip([*weights, *slots, *counts], new, strict=True)), value

    state = {variable.path: variable.value for group in groups for variable in group}
    # Class k is drawn around its own image.
    y = jnp.arange(BATCH) % CLASSES
    x = random(0, CLASSES, 28, 28)[y] + random(1, BATCH, 28, 28, scale=0.5)
    return Case(step, (state, x, y))


def test_ker_1_layouts_of_kernels() -> None:
    """Kernels `[-,model]` and `[model,-]`: gradients and the loss are summed over the
    batch, the logits over the model axis."""
    case = classifier(sequential)
    plan = plan_of_layout(case, MESH, {BATCH: "batch", HIDDEN: "model"})
    by_axes = traffic(plan)
    logits = BATCH // 2 * CLASSES * 4
    assert by_axes.pop(("all_reduce", "model")) == [logits] == [2_048]
    head = HIDDEN // 4 * CLASSES * 4
    sizes = [28 * 28 * HIDDEN, head, HIDDEN, CLASSES * 4, 4]
    assert by_axes.pop(("all_reduce", "batch"))[: len(sizes)] == sizes
    assert sum(sizes) == 102_596
    assert by_axes == {}
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


def test_ker_1_the_solver_finds_something_no_slower() -> None:
    case = classifier(sequential)
    named = plan_of_layout(case, MESH, {BATCH: "batch", HIDDEN: "model"})
    step = autopar.parallelize(case.step, mesh=MESH, pins=LAYOUTS)
    plan = run_as_planned(step, *case.args).plan
    found = homes(plan)
    assert found["state['sequential/dense/kernel']"] == (-1, 1)
    assert found["state['sequential/dense_1/kernel']"] == (-1, 0)
    assert plan.predicted.step_seconds < named.predicted.step_seconds


def test_ker_2_an_exact_path_goes_first_then_the_first_expression_that_matches() -> (
    None
):
    case = classifier(sequential)
    pins = {
        r"dense": P("model"),
        r"kernel": P("batch"),
        "state['sequential/dense_1/kernel']": P(None, "model"),
    }
    step = autopar.parallelize(case.step, mesh=MESH, pins=pins)
    found = homes(step.plan(*case.args))
    assert found["state['sequential/dense/kernel']"] == (-1, 0)
    assert found["state['sequential/dense_1/kernel']"] == (-1, 1)
    assert found["state['adam/sequential_dense_1_kernel_momentum']"] == (-1, 0)


def test_ker_2_what_no_key_matches_is_for_the_solver_or_replicated_on_request() -> None:
    case = classifier(sequential)
    pins = {r"dense.kernel": P(None, "model"), ".*": P()}
    found = homes(autopar.parallelize(case.step, mesh=MESH, pins=pins).plan(*case.args))
    split = {path for path, spec in found.items() if spec != (-1, -1)}
    assert split == {
        "state['sequential/dense/kernel']",
        "state['adam/sequential_dense_kernel_momentum']",
        "state['adam/sequential_dense_kernel_velocity']",
    }
    del pins[".*"]
    found = homes(autopar.parallelize(case.step, mesh=MESH, pins=pins).plan(*case.args))
    assert found["state['sequential/dense/bias']"] == (-1, 0)


def test_ker_2_a_key_is_given_once() -> None:
    case = classifier(sequential)
    twice = [("kernel", P("model")), ("bias", P()), ("kernel", P())]
    with pytest.raises(ValueError, match="once, but got 'kernel' twice"):
        autopar.parallelize(case.step, pins=twice)
    step = autopar.parallelize(case.step, mesh=MESH, pins=twice[:2])
    assert homes(step.plan(*case.args))["state['sequential/dense/bias']"] == (-1, -1)


def test_ker_3_slots_lie_as_their_weights_and_metrics_whole() -> None:
    case = classifier(sequential)
    step = autopar.parallelize(case.step, mesh=MESH, pins=LAYOUTS)
    state, _ = step(*case.args)
    weights = [path for path in state if path.startswith("sequential/")]
    assert len(weights) == 4
    for path in weights:
        for slot in ("momentum", "velocity"):
            moments = state[f"adam/{path.replace('/', '_')}_{slot}"]
            assert moments.sharding == state[path].sharding, path
    for name in ("total", "count"):
        assert state[f"sparse_categorical_accuracy/{name}"].is_fully_replicated


def train(step: Any, case: Case, num_steps: int) -> tuple[list[float], float]:
    """The losses, and the accuracy over all steps."""
    state, x, y = jax.tree.map(jnp.copy, case.args)
    losses = []
    for _ in range(num_steps):
        state, loss = step(state, x, y)
        losses.append(float(loss))
    total, count = (
        float(state[f"sparse_categorical_accuracy/{name}"])
        for name in ("total", "count")
    )
    return losses, total / count


def test_ker_4_three_styles_of_model_train_alike_to_the_reference_accuracy() -> None:
    case = classifier(sequential)
    expected, accuracy = train(jax.jit(case.step), case, 10)
    assert accuracy > 0.7
    for style in (sequential, functional, subclassed):
        case = classifier(style)
        losses, reached = train(autopar.parallelize(case.step, mesh=MESH), case, 10)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert reached == accuracy
