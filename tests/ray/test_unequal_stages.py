"""Stages on unequal numbers of hosts and devices equal one device."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.errors import WorkerError
from autopar.methods.methods import PipelineParallel
from autopar.runtime.ray_executables import RayPipelineExecutable
from autopar.runtime.ray_local import LocalHosts
from autopar.runtime.ray_steps import METRIC_BYTES
from autopar.runtime.ray_workers import Workers
from autopar.state.distributed_array import DistributedArray
from benchmarks.models import Workload, build
from tests.marks import slow
from tests.ray.on_workers import put_in_place_of, traffic_of
from tests.ray.trainings import assert_close

SLOW = pytest.mark.slow  # workers of hosts start, or a step is longer


@pytest.fixture(scope="module")
def three_hosts(ray_hosts: LocalHosts) -> Iterator[Cluster]:
    third = ray_hosts.add()
    yield Cluster.ray(ray_hosts.address, num_hosts=3, silent_seconds=60.0)
    ray_hosts.kill(third)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build("mlp", num_layers=4, optimizer="adamw_clip")


class Training:
    """A pipeline with a submesh of each size, and the same on one device."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        sizes: Sequence[int],
        shared: int = 1,
    ) -> None:
        method = PipelineParallel(
            num_stages=len(sizes) * shared,
            num_microbatches=4,
            stage_meshes=[f"x:{size}" for size in sizes],
            schedule="interleaved" if shared > 1 else "1f1b",
            stages_per_submesh=shared,
        )
        self.step: Any = autopar.parallelize(
            workload.step, method=method, cluster=cluster
        )
        self.reference = jax.jit(workload.step)
        self.init, self.batch = workload.init, workload.make_batch(0)
        self.state: Any = workload.init(jax.random.key(0))

    @property
    def executable(self) -> RayPipelineExecutable:
        (pipelined,) = self.step._running()
        return pipelined.execute

    @property
    def workers(self) -> Workers:
        return self.executable.workers

    def check(self, folder: Path) -> None:
        """Steps, init, save and restore; what passes through the driver."""
        expected = got = self.state, None
        for _ in range(2):
            expected = self.reference(expected[0], self.batch)
            got = self.step(got[0], self.batch)
        assert_close(got, expected)
        traffic = traffic_of(self.workers)
        traffic.largest_array = 0
        made = self.step.init(self.init, jax.random.key(0), batch=self.batch)
        got = self.step(made, self.batch)
        assert traffic.largest_array <= METRIC_BYTES
        leaves = jax.tree.leaves(got[0])
        assert all(isinstance(leaf, DistributedArray) for leaf in leaves)
        autopar.save(folder / "state", got[0])
        places = self.step.abstract_state(
            self.init, jax.random.key(0), batch=self.batch
        )
        restored = autopar.restore(folder / "state", places)
        got = self.step(restored, self.batch)
        assert traffic.largest_array <= METRIC_BYTES
        assert_close(got, expected)


@SLOW
@pytest.mark.parametrize(
    ("sizes", "num_hosts"),
    [((4, 8), (1, 2)), ((8, 1, 3), (2, 1))],
    ids=["one and two hosts", "two hosts and parts of one"],
)
def test_stages_have_unequal_numbers_of_hosts(
    three_hosts: Cluster,
    workload: Workload,
    sizes: tuple[int, ...],
    num_hosts: tuple[int, ...],
    tmp_path: Path,
):
    training = Training(workload, three_hosts, sizes)
    training.check(tmp_path)
    assert training.workers.num_hosts == num_hosts
    training.step.close()


@pytest.mark.parametrize(
    ("sizes", "hosts"),
    [
        slow((2, 2, 2, 2), (0, 0, 1, 1)),
        ((3, 1, 4), (0, 0, 1)),
    ],
    ids=["equal", "unequal"],
)
def test_several_stages_share_a_host(
    ray_cluster: Cluster,
    workload: Workload,
    sizes: tuple[int, ...],
    hosts: tuple[int, ...],
    tmp_path: Path,
):
    training = Training(workload, ray_cluster, sizes)
    training.check(tmp_path)
    assert training.workers.num_hosts == (1, 1), "a process for each host"
    parts = training.executable.parts
    slots = training.executable.program.slots
    for (slot, target), each in parts.crossing.items():
        is_one_host = hosts[slots[slot].stage] == hosts[target]
        assert each.is_inside == is_one_host, "nothing of one host goes over a network"


@SLOW
def test_stages_take_turns_on_parts_of_a_host(
    ray_cluster: Cluster, workload: Workload, tmp_path: Path
):
    training = Training(workload, ray_cluster, (2, 2), shared=2)
    training.check(tmp_path)
    assert training.workers.num_hosts == (1,), "the other host has nothing to do"


def test_stages_share_devices_evenly_if_not_told_how(
    ray_cluster: Cluster, workload: Workload
):
    method = PipelineParallel(num_stages=4, num_microbatches=2)
    step = autopar.parallelize(workload.step, method=method, cluster=ray_cluster)
    plan = step.plan(workload.init(jax.random.key(0)), workload.make_batch(0))
    assert [mesh.size for mesh in plan.stages.meshes] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("meshes", "told"),
    [
        (["x:2", "x:4", "x:2"], r"submesh 1 of \[2, 4, 2\] devices .* 2 to 5 of hosts"),
        (["x:6", "x:2"], r"submesh 0 .* such as \['x:4', 'x:4'\]"),
    ],
)
def test_a_stage_on_parts_of_two_hosts_is_refused(
    ray_cluster: Cluster, workload: Workload, meshes: list[str], told: str
):
    method = PipelineParallel(
        num_stages=len(meshes), num_microbatches=2, stage_meshes=meshes
    )
    step = autopar.parallelize(workload.step, method=method, cluster=ray_cluster)
    with pytest.raises(NotImplementedError, match=told):
        step.plan(workload.init(jax.random.key(0)), workload.make_batch(0))


@SLOW
def test_an_exception_in_one_stage_of_a_host_is_told(
    ray_cluster: Cluster, workload: Workload
):
    training = Training(workload, ray_cluster, (3, 1, 4))
    state, _ = training.step(training.state, training.batch)
    (piece,) = state.params["layers"][1]["kernel"].chunks
    wrong = np.ones((12, 12), np.float32)
    put_in_place_of(training.workers, 0, piece.number, wrong)
    with pytest.raises(
        WorkerError, match=r"(?s)host 0 .*raised by stage 1 in task 1F0"
    ):
        training.step(state, training.batch)
