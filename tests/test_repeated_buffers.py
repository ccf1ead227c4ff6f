"""One array given to a step several times, though a step may reuse its buffer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


def train_step(state: dict[str, jax.Array], x: jax.Array) -> Any:
    return jax.tree.map(lambda a: a + x.mean(), state), x.sum()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("where", ["nowhere yet", "one device", "in place"])
def test_each_is_as_if_it_were_an_array_of_its_own(
    where: str, is_compiled: bool
) -> None:
    step = autopar.parallelize(train_step, mesh="data:8")
    shared = jnp.arange(48.0).reshape(16, 3)
    if where == "one device":
        shared = jax.device_put(shared, jax.devices()[0])
    state: dict[str, Any] = dict.fromkeys("abc", shared)
    run: Any = step.lower(state, shared).compile() if is_compiled else step
    if where == "in place":
        state, _ = run(state, jnp.zeros((16, 3)))
        shared = state["a"]
        state = dict.fromkeys("abc", shared)
    expected = jax.tree.map(np.asarray, state)
    for _ in range(2):
        given = np.asarray(shared).copy()
        state, total = run(state, shared)
        np.testing.assert_allclose(total, given.sum(), rtol=1e-6)
        expected = {name: a + given.mean() for name, a in expected.items()}
        for name in "abc":
            np.testing.assert_allclose(state[name], expected[name], rtol=1e-6)
        shared = state["a"]
        state = dict.fromkeys("abc", shared)
