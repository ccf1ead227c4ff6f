"""From the user's call to the solver it is a short way through the planner."""

import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.planner import intra_op

MOST_FRAMES = 12
PRODUCT = Path(autopar.__file__).parent


class ReachedError(Exception):
    """The solver was called."""


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w).sum())(w)
    return w - gradient, loss


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_budget": "1MB"}, {"remat": "auto", "offload": "auto"}],
    ids=["free", "budget", "variants"],
)
def test_the_solver_is_reached_in_few_frames(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise ReachedError

    monkeypatch.setattr(intra_op, "solve", reached)
    cluster = autopar.Cluster.preset("2x8xH100")
    planned = autopar.parallelize(step, cluster=cluster, **options)
    with pytest.raises(ReachedError) as caught:
        planned.plan(jnp.ones((64, 64)), jnp.ones((64, 64)))
    frames = [
        f"{Path(frame.filename).relative_to(PRODUCT)}:{frame.name}"
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if Path(frame.filename).is_relative_to(PRODUCT)
    ]
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)
