"""What breaks on a host is told by the driver, in time, and leaves nothing behind."""

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.errors import HostLostError, WorkerError
from autopar.methods.methods import Method, PipelineParallel, ShardParallel
from autopar.runtime import ray_workers
from autopar.runtime.ray_local import LocalHosts
from autopar.runtime.ray_workers import Workers, workers_of
from benchmarks.models import build
from tests.marks import slow
from tests.ray.on_workers import put_in_place_of
from tests.ray.trainings import Training


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def wait_until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def placement_groups() -> set[str]:
    """What is reserved of the cluster."""
    from ray.util import placement_group_table

    groups = placement_group_table().items()
    return {name for name, each in groups if each["state"] in ("CREATED", "PENDING")}


class Pipeline:
    """A pipeline of two stages on two hosts, with its first state."""

    def __init__(self, cluster: Cluster) -> None:
        workload = build("mlp")
        method = PipelineParallel(num_stages=2, num_microbatches=2)
        self.step: Any = parallelize(workload.step, method=method, cluster=cluster)
        self.first = workload.init(jax.random.key(0))
        self.batch = workload.make_batch(0)

    @property
    def workers(self) -> Workers:
        (pipelined,) = self.step._running()
        return pipelined.execute.workers

    def process_ids(self) -> list[int]:
        return [facts.process_id for facts in self.workers.facts]


@pytest.fixture(scope="module")
def pipeline(ray_cluster: Cluster) -> Iterator[Pipeline]:
    made = Pipeline(ray_cluster)
    yield made
    made.step.close()


def test_an_exception_tells_stage_host_task_and_traceback(pipeline: Pipeline):
    old, _ = pipeline.step(pipeline.first, pipeline.batch)
    state, _ = pipeline.step(pipeline.first, pipeline.batch)
    processes = pipeline.process_ids()
    # Some kernel of the last stage is replaced by one of another shape.
    leaf = state.params["layers"][-1]["kernel"]
    (piece,) = leaf.chunks
    wrong = np.ones((12, 12), np.float32)
    put_in_place_of(pipeline.workers, 1, piece.number, wrong)
    with pytest.raises(WorkerError) as caught:
        pipeline.step(state, pipeline.batch)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "host 1" in text and "stage 1" in text and "task 1F0" in text
    assert "run 1F0 program" in text and "Traceback" in text
    wait_until(lambda: not any(map(is_alive, processes)))
    with pytest.raises(RuntimeError, match=r"gone: WorkerError: host 1 .* Restore"):
        pipeline.step(old, pipeline.batch)
    _, metrics = pipeline.step(pipeline.first, pipeline.batch)
    assert np.isfinite(metrics["loss"]), "new workers start"


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_dead_worker_is_reported_by_rank_within_seconds(
    pipeline: Pipeline, rank: int
):
    state, _ = pipeline.step(pipeline.first, pipeline.batch)
    processes = pipeline.process_ids()
    os.kill(processes[rank], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(HostLostError, match=f"host {rank} at .* died") as caught:
        for _ in range(1000):
            state, _ = pipeline.step(state, pipeline.batch)
    assert caught.value.rank == rank
    assert time.monotonic() - start < 20
    wait_until(lambda: not any(map(is_alive, processes)))


@pytest.mark.slow  # workers start; test_steps_ahead kills one of a group, too
def test_a_worker_that_dies_in_a_group_is_reported_by_rank(ray_cluster: Cluster):
    workload = build("mlp")
    step: Any = parallelize(workload.step, method=ShardParallel(), cluster=ray_cluster)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    state, _ = step(state, batch)
    (executable,) = step._running()
    processes = [facts.process_id for facts in executable.workers.facts]
    os.kill(processes[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(HostLostError, match="host 1 at .* died"):
        for _ in range(1000):
            state, _ = step(state, batch)
    assert time.monotonic() - start < 60
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_frozen_host_is_given_up_within_ten_seconds(ray_hosts: LocalHosts):
    pipeline = Pipeline(Cluster.ray(ray_hosts.address, num_hosts=2))
    state, _ = pipeline.step(pipeline.first, pipeline.batch)
    processes, start = pipeline.process_ids(), time.monotonic()
    os.kill(processes[1], signal.SIGSTOP)
    with pytest.raises(HostLostError, match="host 1 at .* silent"):
        for _ in range(1000):
            state, _ = pipeline.step(state, pipeline.batch)
    assert time.monotonic() - start < 20, "8 s, and time for a machine that is busy"
    wait_until(lambda: not any(map(is_alive, processes)), seconds=40)


def test_a_call_that_takes_too_long_is_given_up(ray_hosts: LocalHosts):
    cluster = Cluster.ray(ray_hosts.address, num_hosts=1, silent_seconds=60.0)
    workers = workers_of(cluster, (1,))
    (process,) = [facts.process_id for facts in workers.facts]
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(HostLostError, match=r"done in 1 s.*host 0"):
        workers.call("facts", {0: ()}, seconds=1.0)
    wait_until(lambda: not is_alive(process))


def test_closing_a_step_ends_its_workers(
    trainings: Callable[[str, Method], Training],
):
    training = trainings("mlp", ShardParallel())
    state, _ = training.step(training.state, training.batch)
    processes = [facts.process_id for facts in training.workers.facts]
    groups = placement_groups()
    assert all(map(is_alive, processes))
    training.step.close()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert len(groups - placement_groups()) == 1
    with pytest.raises(RuntimeError, match=r"gone: they were closed\. Restore"):
        training.step(state, training.batch)


@pytest.mark.slow  # workers start
def test_dropping_a_step_ends_its_workers(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    workers = weakref.WeakValueDictionary[Any, Workers]()  # as it is but for tests
    monkeypatch.setattr(ray_workers, "_live", workers)
    before, pipeline = placement_groups(), Pipeline(ray_cluster)
    state, _ = pipeline.step(pipeline.first, pipeline.batch)
    processes = pipeline.process_ids()
    assert all(map(is_alive, processes))
    del state, pipeline
    gc.collect()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert placement_groups() == before
