"""Calls that return before their steps are done: values, donation, and lost hosts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.errors import HostLostError
from autopar.methods.methods import Method, ShardParallel
from autopar.runtime.ray_local import LocalHosts
from autopar.state.distributed_array import DistributedArray
from tests.marks import slow
from tests.ray.trainings import MODELS, TWO_STAGES, Training, assert_close

AHEAD = 2


class Ahead(Training):
    """A step that may be two calls behind, and its state."""

    def __init__(self, method: Method, cluster: Cluster) -> None:
        super().__init__(MODELS["mlp"](), method, cluster)
        init = self.workload.init
        first = self.step.init(init, jax.random.key(0), batch=self.batch)
        state, _ = self.step(first, self.batch)  # compiles
        self.state = jax.block_until_ready(state)

    @contextmanager
    def standing_still(self) -> Iterator[list[int]]:
        """All hosts do nothing meanwhile; gives their processes."""
        processes = [facts.process_id for facts in self.workers.facts]
        for each in processes:
            os.kill(each, signal.SIGSTOP)
        try:
            yield processes
        finally:
            for each in processes:
                os.kill(each, signal.SIGCONT)


@pytest.fixture(
    scope="module",
    params=[ShardParallel(), slow(TWO_STAGES)],
    ids=["one program", "two stages"],
)
def ahead(request: pytest.FixtureRequest, ray_hosts: LocalHosts) -> Iterator[Ahead]:
    cluster = Cluster.ray(
        ray_hosts.address, num_hosts=2, silent_seconds=60.0, steps_ahead=AHEAD
    )
    made = Ahead(request.param, cluster)
    yield made
    made.step.close()


def test_a_call_returns_before_its_step_is_done(ahead: Ahead):
    state, losses = autopar.fetch(ahead.state), []
    for _ in range(6):
        state, metrics = ahead.reference(state, ahead.batch)
        losses.append(float(metrics["loss"]))
    got, found = ahead.state, []
    with ahead.standing_still():
        for _ in range(AHEAD):
            got, metrics = ahead.step(got, ahead.batch)
            found.append(metrics["loss"])
    assert all(isinstance(loss, DistributedArray) for loss in found)
    for _ in range(AHEAD, 6):
        got, metrics = ahead.step(got, ahead.batch)
        found.append(metrics["loss"])
        assert len(ahead.workers._under_way) <= AHEAD
    np.testing.assert_allclose([float(loss) for loss in found], losses, rtol=2e-5)
    assert f"{found[0]:.3f}" == f"{losses[0]:.3f}"
    assert_close(got, state)
    ahead.state = got


def test_what_a_step_takes_is_known_when_it_is_asked_for(ahead: Ahead):
    old = ahead.state
    with ahead.standing_still():
        ahead.state, _ = ahead.step(old, ahead.batch)
    with pytest.raises(RuntimeError, match="Pass the state that the last call"):
        ahead.step(old, ahead.batch)
    assert jax.tree.leaves(old.params)[0].is_deleted()
    assert ahead.workers.lost is None, "the workers go on"


def test_a_lost_host_is_told_where_a_result_is_read_and_by_the_next_call(ahead: Ahead):
    with ahead.standing_still() as processes:
        state, metrics = ahead.step(ahead.state, ahead.batch)
        os.kill(processes[1], signal.SIGKILL)
        processes.pop()
    with pytest.raises(HostLostError, match="host 1 at .* died") as caught:
        float(metrics["loss"])
    assert caught.value.rank == 1
    with pytest.raises(HostLostError, match="host 1 at .* died"):
        ahead.step(state, ahead.batch)


@pytest.mark.parametrize("number", [-1, 9, True, 1.5])
def test_the_number_is_checked(ray_hosts: LocalHosts, number: Any):
    with pytest.raises(ValueError, match="`steps_ahead` must be a number from 0 to 8"):
        Cluster.ray(ray_hosts.address, steps_ahead=number)
