"""State of workers is written and read by the workers, whatever plan they run."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import Method, PipelineParallel, ShardParallel
from benchmarks.models import Workload, build
from tests.ray.on_workers import traffic_of

FORMS = {
    "one program": (ShardParallel(), "data:2;model:4"),
    "two stages": (PipelineParallel(num_stages=2, num_microbatches=2), "x:4"),
}
SMALL_BYTES = 2048  # what calls carry besides arrays: keys and counters


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build("mlp", hidden=256, batch_size=16)


@pytest.fixture(scope="module")
def steps(workload: Workload, ray_cluster: Cluster) -> Any:
    made: dict[str, Any] = {}
    for name, (method, mesh) in FORMS.items():
        chosen: Method = method
        made[name] = parallelize(
            workload.step, method=chosen, mesh=mesh, cluster=ray_cluster
        )
    yield made
    for step in made.values():
        step.close()


def workers_of(step: Any) -> Any:
    """The workers that run a step, of which there is one form."""
    (executable,) = step._running()
    return getattr(executable, "execute", executable).workers


def carried(step: Any) -> int:
    """Bytes of arrays that have passed through the driver."""
    traffic = traffic_of(workers_of(step))
    return traffic.to_hosts + traffic.from_hosts


def losses(step: Any, state: Any, workload: Workload, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        state, metrics = step(state, workload.make_batch(number))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param("one program", marks=pytest.mark.slow), "two stages"]
)
def test_a_state_is_saved_and_goes_on_under_either_plan(
    steps: Any, workload: Workload, name: str, tmp_path: Path
):
    step, batch = steps[name], workload.make_batch(0)
    like = workload.init, jax.random.key(0)
    state = step.init(*like, batch=batch)
    state, _ = step(state, batch)
    before = carried(step)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_position={"batches": 1})
    assert carried(step) - before <= SMALL_BYTES, "hosts write their own shards"
    expected = losses(step, state, workload, range(1, 4))
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for other in steps.values():
            places = other.abstract_state(*like, batch=batch)
            found = checkpoints.restore(places)
            assert (found.step, found.data_position) == (1, {"batches": 1})
            got = losses(other, found.state, workload, range(1, 4))
            np.testing.assert_allclose(got, expected, rtol=2e-5)
        alone = checkpoints.restore(jax.eval_shape(*like)).state
    got = losses(jax.jit(workload.step), alone, workload, range(1, 4))
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_what_workers_read_does_not_pass_through_the_driver(
    steps: Any, workload: Workload, tmp_path: Path
):
    step, batch = steps["one program"], workload.make_batch(0)
    state = workload.init(jax.random.key(0))
    autopar.save(tmp_path / "first", state)
    step(step.init(workload.init, jax.random.key(0), batch=batch), batch)
    places = step.abstract_state(workload.init, jax.random.key(0), batch=batch)
    before = carried(step)
    step(autopar.restore(tmp_path / "first", places), batch)
    batch_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert carried(step) - before <= 4 * batch_bytes + SMALL_BYTES < state_bytes / 10


@pytest.fixture
def saved(steps: Any, workload: Workload, tmp_path: Path) -> Iterator[Any]:
    """Checkpoints of the first state, of step 1, and the places of a step's plan."""
    step, batch = steps["one program"], workload.make_batch(0)
    like = workload.init, jax.random.key(0)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, step.init(*like, batch=batch))
        checkpoints.wait()
        yield checkpoints, step.abstract_state(*like, batch=batch)


def test_a_full_disk_of_a_host_leaves_the_checkpoint_before(
    saved: Any, steps: Any, workload: Workload
):
    checkpoints, places = saved
    step = steps["one program"]
    state = checkpoints.restore(places).state
    state, _ = step(state, workload.make_batch(0))
    process = workers_of(step).facts[1].process_id
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
    steps: Any, workload: Workload, tmp_path: Path
):
    step, batch = steps["one program"], workload.make_batch(0)
    state = step.init(workload.init, jax.random.key(0), batch=batch)
    autopar.save(tmp_path / "state", state)
    files = [p for p in (tmp_path / "state").rglob("*") if p.is_file()]
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert sum(p.stat().st_size for p in files) < 1.05 * state_bytes
    got = autopar.fetch(autopar.restore(tmp_path / "state", state))
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(autopar.fetch(state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
