"""A training goes on when workers die or hang, and when a host is gone for good."""

import dataclasses
import os
import re
import signal
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.errors import HostLostError
from autopar.runtime import ray_actors, ray_workers
from autopar.runtime.ray_local import LocalHosts
from autopar.runtime.ray_workers import workers_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.faults import Fault, FaultInjection, FaultyBatches, measure
from benchmarks.models import Workload, build

NUM_STEPS = 8
KILLS = (
    Fault("backward", 4, 1, signal.SIGKILL, 0.001),
    Fault("save", 9, 0, signal.SIGKILL, 0.0),
)


# One that was being written when a host was killed is passed over, with a warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint of step")
def test_killed_workers_are_told_and_no_loss_is_wrong(
    ray_hosts: LocalHosts, caplog: pytest.LogCaptureFixture
):
    found = measure(ray_hosts.address, KILLS)
    assert [each.fault for each in found.outcomes] == list(KILLS)
    assert found.wrong_losses == 0
    assert found.losses > found.num_steps, "steps since the checkpoint came again"
    assert all(each.is_named for each in found.outcomes)
    assert all(each.detect_seconds < 20 for each in found.outcomes)
    told = {record.name for record in caplog.records if record.exc_info}
    assert "absl" not in told, "a line of ours says it, not tracebacks of threads"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build("mlp", hidden=96, batch_size=96)


def training_of(
    cluster: Cluster, method: Any, workload: Workload, checkpoints: Any
) -> autopar.Training:
    none = FaultInjection.of_none(workload)
    return autopar.Training(
        autopar.parallelize(workload.step, method=method, cluster=cluster),
        *(checkpoints, workload.init, jax.random.key(0)),
        batches=lambda position: FaultyBatches(position, none),
        save_every=2,
    )


@pytest.fixture(autouse=True)
def _own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers end with their step, as a user's do."""
    monkeypatch.setattr(ray_workers, "_live", WeakValueDictionary())


def losses_of_one_device(workload: Workload) -> list[float]:
    state, losses = workload.init(jax.random.key(0)), []
    for number in range(NUM_STEPS):
        state, metrics = jax.jit(workload.step)(state, workload.make_batch(number))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow  # workers start twice
def test_steps_begun_ahead_are_run_again(
    ray_hosts: LocalHosts, workload: Workload, tmp_path: Path
):
    cluster = Cluster.ray(ray_hosts.address, num_hosts=2, steps_ahead=2)
    expected, got = losses_of_one_device(workload), dict[int, float]()
    with autopar.Checkpoints(tmp_path) as checkpoints:
        method = autopar.ShardParallel()
        training = training_of(cluster, method, workload, checkpoints)
        for number, metrics in training.run(NUM_STEPS):
            got[number] = float(metrics["loss"])
            if number == 3 and not training.recoveries:
                os.kill(workers_of(cluster, (2,)).facts[1].process_id, signal.SIGKILL)
        training.step.close()
    assert list(got) == list(range(NUM_STEPS))
    np.testing.assert_allclose(list(got.values()), expected, rtol=1e-5)
    (recovery,) = training.recoveries
    assert "host 1" in recovery.error and recovery.num_hosts == 2


@pytest.mark.slow  # a host more starts, and Ray takes seconds to give it up
@pytest.mark.parametrize(
    ("meshes", "left"),
    [(None, None), (("x:2", "x:2", "x:8"), [4, 2, 2])],
    ids=["whole hosts", "parts of hosts"],
)
def test_a_lost_host_leaves_a_plan_for_fewer(
    ray_hosts: LocalHosts,
    workload: Workload,
    tmp_path: Path,
    meshes: tuple[str, ...] | None,
    left: list[int] | None,
):
    third = ray_hosts.add()
    cluster = Cluster.ray(ray_hosts.address, num_hosts=3)
    method = autopar.PipelineParallel(3, 3, stage_meshes=meshes)
    expected, got = losses_of_one_device(workload), dict[int, float]()
    with autopar.Checkpoints(tmp_path) as checkpoints:
        training = training_of(cluster, method, workload, checkpoints)
        for number, metrics in training.run(NUM_STEPS):
            if number == 4 and not training.recoveries:
                checkpoints.wait()  # that of step 3 is there
                ray_hosts.kill(third)
            got[number] = float(metrics["loss"])
        np.testing.assert_allclose(list(got.values()), expected, rtol=1e-5)
        assert training.recoveries[-1].num_hosts == 2
        assert training.recoveries[-1].from_step >= 4, "after the checkpoint of step 3"
        found = training.step.options.method
        if left is None:
            assert isinstance(found, autopar.ShardParallel)
        else:
            assert isinstance(found, autopar.PipelineParallel) and found.stage_meshes
            assert [parse_mesh(mesh).size for mesh in found.stage_meshes] == left
        training.step.close()


@pytest.mark.slow  # as above
def test_a_host_lost_while_the_step_is_planned_is_told(
    ray_hosts: LocalHosts, workload: Workload, tmp_path: Path
):
    third, killed = ray_hosts.add(), list[int]()
    cluster = Cluster.ray(ray_hosts.address, num_hosts=3)

    def init(key: jax.Array) -> Any:
        if not killed:  # it is traced when the step is planned
            killed.append(1)
            ray_hosts.kill(third)
        return workload.init(key)

    expected, got = losses_of_one_device(workload), dict[int, float]()
    with autopar.Checkpoints(tmp_path) as checkpoints:
        made = dataclasses.replace(workload, init=init)
        training = training_of(cluster, autopar.ShardParallel(), made, checkpoints)
        for number, metrics in training.run(NUM_STEPS):
            got[number] = float(metrics["loss"])
        training.step.close()
    np.testing.assert_allclose(list(got.values()), expected, rtol=1e-5)
    recovery = training.recoveries[-1]
    assert (recovery.at_step, recovery.num_hosts) == (0, 2)
    assert re.search(r"the host at .* is gone: 2 of 3 are left", recovery.error)


@pytest.mark.slow  # as above, and another host starts
def test_a_lost_host_is_waited_for(
    ray_hosts: LocalHosts,
    workload: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    hosts, too_few = [ray_hosts.add()], list[int]()
    count = ray_actors.num_hosts_alive

    def num_hosts_alive(cluster: Cluster) -> int:
        """As many as there are; when they were too few twice, a host comes."""
        if (found := count(cluster)) < 3:
            too_few.append(found)
            if len(too_few) == 2:
                hosts.append(ray_hosts.add())
        return found

    monkeypatch.setattr(ray_actors, "num_hosts_alive", num_hosts_alive)
    cluster = Cluster.ray(ray_hosts.address, num_hosts=3, on_failure="wait")
    got: list[int] = []
    with autopar.Checkpoints(tmp_path) as checkpoints:
        method = autopar.ShardParallel()
        training = training_of(cluster, method, workload, checkpoints)
        for number, metrics in training.run(NUM_STEPS):
            assert np.isfinite(metrics["loss"])
            got.append(number)
            if number == 4 and not training.recoveries:
                checkpoints.wait()  # that of step 3 is there
                ray_hosts.kill(hosts.pop())
        assert set(too_few) == {2}, "it waited"
        (recovery,) = training.recoveries
        assert recovery.num_hosts == 3 and recovery.from_step >= 4
        again = list(range(recovery.from_step, NUM_STEPS))
        assert got[-len(again) :] == again and set(got) == set(range(NUM_STEPS))
        assert training.step is training._given, "the plan is the one that there was"
        training.step.close()
    ray_hosts.kill(hosts.pop())


@pytest.mark.slow
def test_what_is_to_be_raised_is_raised(
    ray_hosts: LocalHosts, workload: Workload, tmp_path: Path
):
    cluster = Cluster.ray(ray_hosts.address, num_hosts=2, on_failure="raise")
    method, numbers = autopar.ShardParallel(), []
    with (
        pytest.raises(HostLostError, match="host 0 at .* died"),
        autopar.Checkpoints(tmp_path) as checkpoints,
    ):
        training = training_of(cluster, method, workload, checkpoints)
        for number, _ in training.run(NUM_STEPS):
            numbers.append(number)
            if number == 2:
                victim = workers_of(cluster, (2,)).facts[0]
                os.kill(victim.process_id, signal.SIGKILL)
    assert numbers == [0, 1, 2]


def test_failure_modes_are_checked(ray_hosts: LocalHosts):
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match="'replan', 'wait' or 'raise', but got 'ig"):
        Cluster.ray(ray_hosts.address, on_failure=wrong)
