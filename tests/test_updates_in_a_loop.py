"""Steps that make several updates a call: the examples of each are cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests.marks import slow

NUM_UPDATES = 2
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STAGES = PipelineParallel(num_stages=2, num_microbatches=4)


def update(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    weights, moments = state

    def loss(weights):
        kept = jax.random.bernoulli(batch["key"], 0.9, (16,))
        h = jnp.tanh(batch["x"] @ weights["a"]) * kept
        return jnp.mean((jnp.tanh(h @ weights["b"]) - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    changes, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, changes), moments), value


def updates(state: Any, batches: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    return jax.lax.scan(update, state, batches)


def backwards(state: Any, batches: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    return jax.lax.scan(update, state, batches, reverse=True)


def epochs(state: Any, batches: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    """Each begins with the last batch."""
    return jax.lax.scan(lambda s, _: backwards(s, batches), state, None, length=2)


def with_mean(state: Any, batches: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    state, losses = epochs(state, batches)
    return state, losses.mean()


def by_index(state: Any, batches: dict[str, jax.Array]) -> Any:
    def body(i, state):
        return update(state, jax.tree.map(lambda a: a[i], batches))[0]

    return jax.lax.fori_loop(0, NUM_UPDATES, body, state)


def arguments() -> tuple[Any, dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "a": jax.random.normal(keys[0], (8, 16)) / 4,
        "b": jax.random.normal(keys[1], (16, 4)) / 4,
    }
    batches = {
        "x": jax.random.normal(keys[2], (NUM_UPDATES, 16, 8)),
        "y": jax.random.normal(keys[3], (NUM_UPDATES, 16, 4)),
        "key": jax.random.split(jax.random.key(1), NUM_UPDATES),
    }
    return (weights, OPTIMIZER.init(weights)), batches


def check(step: Any, fun: Any) -> None:
    state, batches = arguments()
    found, expected = (state, None), (state, None)
    for _ in range(2):
        found = step(found[0], batches)
        expected = jax.jit(fun)(expected[0], batches)
    leaves = map(jax.tree.leaves, jax.device_get((found, expected)))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fun", [slow(epochs), with_mean])
def test_microbatches_are_those_of_each_update(fun: Callable[..., Any]) -> None:
    step = parallelize(fun, mesh="x:8", num_microbatches=4, donate_argnums=())
    check(step, fun)
    lowered: Any = step.lower(*arguments())
    rows = {
        op.operand_types[0].shape[0]
        for op in lowered.graph.operators()
        if op.kind == "dot_general" and "transpose(" not in op.name
    }
    assert rows == {4}


@pytest.mark.parametrize("fun", [slow(updates), epochs])
def test_stages_run_once_an_update(fun: Any) -> None:
    check(parallelize(fun, method=STAGES, donate_argnums=()), fun)


@pytest.mark.parametrize(
    ("fun", "options", "remedy"),
    [
        (by_index, {"num_microbatches": 4}, "jax.lax.scan"),
        (with_mean, {"method": STAGES}, "ShardParallel"),
    ],
)
def test_other_loops_of_updates_are_named(fun: Any, options: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"loop of updates 'scan.0' at .*test_up") as e:
        step: Any = parallelize(fun, **options)
        step(*arguments())
    assert "call the step once an update" in str(e.value)
    assert remedy in str(e.value)
