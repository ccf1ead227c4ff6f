"""State of workers is written and read by the workers, whatever plan they run."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.methods.methods import Method, ShardParallel
from benchmarks.models import Workload
from tests.marks import slow
from tests.ray.on_workers import traffic_of
from tests.ray.trainings import TWO_STAGES, Training

SMALL_BYTES = 2048  # what calls carry besides arrays: keys and counters
METHODS = ShardParallel(), TWO_STAGES
Trainings = Callable[[str, Method], Training]


@pytest.fixture
def one_program(trainings: Trainings) -> Training:
    return trainings("mlp", ShardParallel())


def carried(training: Training) -> int:
    """Bytes of arrays that have passed through the driver."""
    traffic = traffic_of(training.workers)
    return traffic.to_hosts + traffic.from_hosts


def losses(step: Any, state: Any, workload: Workload, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        state, metrics = step(state, workload.make_batch(number))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize(
    "method",
    [slow(ShardParallel()), TWO_STAGES],
    ids=["one program", "two stages"],
)
def test_a_state_is_saved_and_goes_on_under_either_plan(
    trainings: Trainings, method: Method, tmp_path: Path
):
    training = trainings("mlp", method)
    workload, step, batch = training.workload, training.step, training.batch
    like = workload.init, jax.random.key(0)
    state = step.init(*like, batch=batch)
    state, _ = step(state, batch)
    before = carried(training)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_position={"batches": 1})
    assert carried(training) - before <= SMALL_BYTES, "hosts write their own shards"
    expected = losses(step, state, workload, range(1, 4))
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for other in (trainings("mlp", each).step for each in METHODS):
            places = other.abstract_state(*like, batch=batch)
            found = checkpoints.restore(places)
            assert (found.step, found.data_position) == (1, {"batches": 1})
            got = losses(other, found.state, workload, range(1, 4))
            np.testing.assert_allclose(got, expected, rtol=2e-5)
        alone = checkpoints.restore(jax.eval_shape(*like)).state
    got = losses(training.reference, alone, workload, range(1, 4))
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_what_workers_read_does_not_pass_through_the_driver(
    one_program: Training, tmp_path: Path
):
    step, batch, state = one_program.step, one_program.batch, one_program.state
    like = one_program.workload.init, jax.random.key(0)
    autopar.save(tmp_path / "first", state)
    step(step.init(*like, batch=batch), batch)
    places = step.abstract_state(*like, batch=batch)
    before = carried(one_program)
    step(autopar.restore(tmp_path / "first", places), batch)
    batch_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    passed = carried(one_program) - before
    assert passed <= 4 * batch_bytes + SMALL_BYTES < state_bytes / 10


@pytest.fixture
def saved(one_program: Training, tmp_path: Path) -> Iterator[Any]:
    """Checkpoints of the first state, of step 1, and the places of a step's plan."""
    step, batch = one_program.step, one_program.batch
    like = one_program.workload.init, jax.random.key(0)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, step.init(*like, batch=batch))
        checkpoints.wait()
        yield checkpoints, step.abstract_state(*like, batch=batch)


def test_a_full_disk_of_a_host_leaves_the_checkpoint_before(
    saved: Any, one_program: Training
):
    checkpoints, places = saved
    state = checkpoints.restore(places).state
    state, _ = one_program.step(state, one_program.batch)
    process = one_program.workers.facts[1].process_id
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        checkpoints.save(2, state)
        with pytest.raises(OSError, match=r"that of 1 stays.*host 1.* could not write"):
            checkpoints.wait()
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)
    assert checkpoints.steps() == (1,)
    checkpoints.save(3, state)  # the workers go on
    checkpoints.wait()
    assert checkpoints.steps() == (1, 3)


def test_files_hold_one_copy_and_no_two_hosts_write_one(
    one_program: Training, tmp_path: Path
):
    init, batch = one_program.workload.init, one_program.batch
    state = one_program.step.init(init, jax.random.key(0), batch=batch)
    autopar.save(tmp_path / "state", state)
    files = [p for p in (tmp_path / "state").rglob("*") if p.is_file()]
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert sum(p.stat().st_size for p in files) < 1.05 * state_bytes
    got = autopar.fetch(autopar.restore(tmp_path / "state", state))
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(autopar.fetch(state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
