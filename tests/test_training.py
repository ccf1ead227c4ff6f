"""`autopar.Training` where no host is lost: it saves, and goes on where it was."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import HostLostError
from tests.like_jit import make_batch, make_params, sgd_step


@dataclass
class NumberedBatches:
    """Batches by number."""

    position: int

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return batch_of(self.position - 1)


def batch_of(number: int) -> Any:
    return jax.tree.map(lambda x: x + np.float32(number), make_batch())


def init(scale: float) -> Any:
    return jax.tree.map(lambda w: w * scale, make_params())


@pytest.fixture(scope="module")
def step() -> autopar.ParallelFunction:
    return autopar.parallelize(sgd_step)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of one device."""
    state, losses = init(0.5), []
    for number in range(6):
        state, loss = jax.jit(sgd_step)(state, batch_of(number))
        losses.append(float(loss))
    return losses


def training_of(step: Any, checkpoints: Any) -> autopar.Training:
    return autopar.Training(
        *(step, checkpoints, init, 0.5),
        batches=lambda position: NumberedBatches(position or 0),
        save_every=2,
    )


def losses_of(training: autopar.Training, num_steps: int) -> dict[int, float]:
    return {n: float(found) for n, found in training.run(num_steps)}


def test_another_process_goes_on_at_the_right_batch(
    step: Any, expected: list[float], tmp_path: Path
):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        first = losses_of(training_of(step, checkpoints), 3)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (1, 2), "every second, and the last one"
        then = losses_of(training_of(step, checkpoints), 6)
    assert (list(first), list(then)) == ([0, 1, 2], [3, 4, 5])
    got = [*first.values(), *then.values()]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_error_of_the_step_is_no_lost_host(tmp_path: Path):
    def broken(state: Any, batch: Any) -> Any:
        raise ZeroDivisionError("a user's mistake")

    with autopar.Checkpoints(tmp_path) as checkpoints:
        training = training_of(autopar.parallelize(broken), checkpoints)
        with pytest.raises(ZeroDivisionError, match="mistake"):
            losses_of(training, 2)


def test_a_lost_host_is_raised_where_there_is_no_cluster_of_hosts(tmp_path: Path):
    def losing(state: Any, batch: Any) -> Any:
        raise HostLostError("host 1 died", 1)

    with autopar.Checkpoints(tmp_path) as checkpoints:
        training = training_of(autopar.parallelize(losing), checkpoints)
        with pytest.raises(HostLostError, match="host 1 died"):
            losses_of(training, 2)


def test_saving_never_is_refused(step: Any, tmp_path: Path):
    with (
        autopar.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="1 step or more, but got save_every=0"),
    ):
        autopar.Training(
            *(step, checkpoints, init, 0.5),
            batches=lambda position: NumberedBatches(position or 0),
            save_every=0,
        )
