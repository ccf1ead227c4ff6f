"""`autopar.Training` where no host is lost: it saves, and goes on where it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import HostLostError
from benchmarks.models import Workload, build


class NumberedBatches:
    """Batches by number."""

    def __init__(self, workload: Workload, position: int | None) -> None:
        self.workload, self.position = workload, position or 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return self.workload.make_batch(self.position - 1)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build("mlp", optimizer="sgd")


@pytest.fixture(scope="module")
def step(workload: Workload) -> autopar.ParallelFunction:
    return autopar.parallelize(workload.step)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> list[float]:
    """The losses of one device."""
    state, losses = workload.init(jax.random.key(0)), []
    for number in range(6):
        state, metrics = jax.jit(workload.step)(state, workload.make_batch(number))
        losses.append(float(metrics["loss"]))
    return losses


def training_of(step: Any, workload: Workload, checkpoints: Any) -> autopar.Training:
    return autopar.Training(
        *(step, checkpoints, workload.init, jax.random.key(0)),
        batches=lambda position: NumberedBatches(workload, position),
        save_every=2,
    )


def losses_of(training: autopar.Training, num_steps: int) -> dict[int, float]:
    return {n: float(found["loss"]) for n, found in training.run(num_steps)}


def test_another_process_goes_on_at_the_right_batch(
    step: Any, workload: Workload, expected: list[float], tmp_path: Path
):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        first = losses_of(training_of(step, workload, checkpoints), 3)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (1, 2), "every second, and the last one"
        then = losses_of(training_of(step, workload, checkpoints), 6)
    assert (list(first), list(then)) == ([0, 1, 2], [3, 4, 5])
    got = [*first.values(), *then.values()]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_error_of_the_step_is_no_lost_host(workload: Workload, tmp_path: Path):
    def broken(state: Any, batch: Any) -> Any:
        raise ZeroDivisionError("a user's mistake")

    with autopar.Checkpoints(tmp_path) as checkpoints:
        training = training_of(autopar.parallelize(broken), workload, checkpoints)
        with pytest.raises(ZeroDivisionError, match="mistake"):
            losses_of(training, 2)


def test_a_lost_host_is_raised_where_there_is_no_cluster_of_hosts(
    workload: Workload, tmp_path: Path
):
    def losing(state: Any, batch: Any) -> Any:
        raise HostLostError("host 1 died", 1)

    with autopar.Checkpoints(tmp_path) as checkpoints:
        training = training_of(autopar.parallelize(losing), workload, checkpoints)
        with pytest.raises(HostLostError, match="host 1 died"):
            losses_of(training, 2)


def test_saving_never_is_refused(step: Any, workload: Workload, tmp_path: Path):
    with (
        autopar.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="1 step or more, but got save_every=0"),
    ):
        autopar.Training(
            *(step, checkpoints, workload.init),
            batches=lambda position: NumberedBatches(workload, position),
            save_every=0,
        )
