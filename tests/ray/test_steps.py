"""Steps on two hosts equal one device; state stays there, only metrics come back."""

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import Method, PipelineParallel, ShardParallel
from autopar.runtime.ray_steps import METRIC_BYTES
from autopar.state.distributed_array import DistributedArray
from tests.marks import slow
from tests.ray.on_workers import kept_by, traffic_of
from tests.ray.trainings import FORMS, MODELS, TWO_STAGES, Training, assert_close


@FORMS
@pytest.mark.parametrize("model", ["mlp", slow("gpt")])
def test_the_whole_state_equals_the_full_batch_step(
    trainings: Any, model: str, method: Method
):
    training = trainings(model, method)
    expected = got = training.state, None
    for _ in range(3):
        expected = training.reference(expected[0], training.batch)
        got = training.step(got[0], training.batch)
    assert_close(got, expected)


@FORMS
def test_only_the_batch_and_metrics_pass_through_the_driver(
    trainings: Any, method: Method
):
    training = trainings("mlp", method)
    state, _ = training.step(training.state, training.batch)
    assert all(isinstance(x, DistributedArray) for x in jax.tree.leaves(state))
    traffic = traffic_of(training.workers)
    sent, received = traffic.to_hosts, traffic.from_hosts
    traffic.largest_array = 0
    state, metrics = training.step(state, training.batch)
    batch_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(training.batch))
    assert traffic.largest_array <= METRIC_BYTES
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert traffic.to_hosts - sent <= 4 * batch_bytes < state_bytes / 10
    assert traffic.from_hosts - received <= 1024
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(metrics))


@FORMS
def test_the_workers_keep_one_state_and_nothing_else(trainings: Any, method: Method):
    training = trainings("mlp", method)
    state = training.state
    training.step(state, training.batch)  # so that there are workers
    gc.collect()
    before = kept_by(training.workers)
    for _ in range(3):
        state, _ = training.step(state, training.batch)
    leaves = len(jax.tree.leaves(state))
    kept = kept_by(training.workers)
    added = [after - old for after, old in zip(kept, before, strict=True)]
    # One group holds a part of every leaf on each host; stages share out the leaves.
    is_pipeline = isinstance(method, PipelineParallel)
    assert sum(added) == leaves if is_pipeline else added == [leaves, leaves]
    del state
    gc.collect()
    assert kept_by(training.workers) == before


@FORMS
def test_donated_state_is_refused_with_the_remedy(trainings: Any, method: Method):
    training = trainings("mlp", method)
    old, _ = training.step(training.state, training.batch)
    training.step(old, training.batch)
    leaf = jax.tree.leaves(old.params)[0]
    assert leaf.is_deleted()
    with pytest.raises(RuntimeError, match="Pass the state that the last call"):
        training.step(old, training.batch)
    assert training.workers.lost is None, "the workers go on"


@FORMS
def test_init_makes_the_state_on_the_workers(trainings: Any, method: Method):
    training = trainings("mlp", method)
    training.step(training.state, training.batch)
    traffic = traffic_of(training.workers)
    before = traffic.to_hosts, traffic.from_hosts
    state = training.step.init(
        training.workload.init, jax.random.key(0), batch=training.batch
    )
    after = traffic.to_hosts, traffic.from_hosts
    assert sum(after) - sum(before) < 100, "a key goes there, and nothing comes back"
    assert_close(state, training.state)
    training.step(state, training.batch)


@FORMS
def test_a_saved_state_goes_on_there_and_on_one_device(
    trainings: Any, method: Method, tmp_path: Path
):
    training = trainings("mlp", method)
    state, _ = training.step(training.state, training.batch)
    autopar.save(tmp_path / "state", state)
    expected, _ = training.step(state, training.batch)
    restored = autopar.restore(tmp_path / "state", training.state)
    got, _ = training.step(restored, training.batch)
    assert_close(got, autopar.fetch(expected))
    alone, _ = training.reference(restored, training.batch)
    assert_close(expected, alone)


def busy_at_once(training: Training) -> float:
    """In which part of a step both stages are busy."""
    state, _ = training.step(training.state, training.batch)
    (pipelined,) = training.step._running()
    pieces = pipelined.pipeline.split(jax.tree.leaves((state, training.batch)))
    _, _, timeline = training.executable.record(
        {**pipelined.pipeline.state_of(pieces), **pipelined.constants},
        pipelined.pipeline.batch_of(pieces),
    )
    schedule = training.executable.instructions
    assert len(timeline.events) >= len(schedule)
    first = [(e.start, e.end) for e in timeline.events if e.submesh == 0]
    second = [(e.start, e.end) for e in timeline.events if e.submesh == 1]
    both = sum(
        max(0.0, min(a_end, b_end) - max(a_start, b_start))
        for a_start, a_end in first
        for b_start, b_end in second
    )
    return both / timeline.makespan_seconds


def test_both_stages_are_busy_at_once(trainings: Any):
    training = trainings("mlp", TWO_STAGES)
    found = [busy_at_once(training) for _ in range(3)]
    assert max(found) > 0.05, "the machine may be busy in one of them"


def test_a_host_may_run_several_stages(ray_cluster: Cluster):
    method = PipelineParallel(
        num_stages=4, num_microbatches=4, schedule="interleaved", stages_per_submesh=2
    )
    training = Training(MODELS["mlp"](), method, ray_cluster)
    expected = got = training.state, None
    for _ in range(2):
        expected = training.reference(expected[0], training.batch)
        got = training.step(got[0], training.batch)
    assert_close(got, expected)


def test_an_eval_step_reads_the_state_where_it_lies(
    trainings: Any, ray_cluster: Cluster
):
    training = trainings("mlp", ShardParallel())
    state, _ = training.step(training.state, training.batch)

    def mean_square(state: Any) -> jax.Array:
        leaves = jax.tree.leaves(state.params)
        return sum((jnp.mean(x**2) for x in leaves), jnp.float32(0))

    evaluate = parallelize(mean_square, cluster=ray_cluster, mesh="data:2;model:4")
    traffic = traffic_of(training.workers)
    sent = traffic.to_hosts
    found = evaluate(state)
    assert traffic.to_hosts == sent, "the state is there already"
    np.testing.assert_allclose(found, mean_square(autopar.fetch(state)), rtol=1e-5)


def test_large_results_stay_on_the_workers(ray_cluster: Cluster):
    step = parallelize(lambda x: (x * 2, x.sum()), cluster=ray_cluster, mesh="x:8")
    x = np.ones((256, 256), np.float32)
    assert x.nbytes > METRIC_BYTES
    twice, total = step(x)
    assert isinstance(twice, DistributedArray) and isinstance(total, jax.Array)
    np.testing.assert_array_equal(autopar.fetch(twice), 2 * x)
    assert float(total) == x.size


def test_random_keys_and_closed_over_arrays_go_along(ray_cluster: Cluster):
    scale = jnp.arange(8.0)

    def step(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, now = jax.random.split(key)
        return key, (x + scale * jax.random.normal(now, x.shape)).sum(0)

    remote = parallelize(step, cluster=ray_cluster, mesh="x:8")
    x, key = jnp.ones((16, 8)), jax.random.key(3)
    got, expected = remote(key, x), jax.jit(step)(key, x)
    for _ in range(2):
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
        assert jax.random.key_data(got[0]).tolist() == (
            jax.random.key_data(expected[0]).tolist()
        )
        got, expected = remote(got[0], x), jax.jit(step)(expected[0], x)


def test_host_callbacks_are_refused_before_anything_is_sent(ray_cluster: Cluster):
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return x + 1

    with pytest.raises(NotImplementedError, match=r"test_steps\.py:\d+"):
        parallelize(step, cluster=ray_cluster)(jnp.ones(8))


def test_a_mesh_of_own_devices_is_refused(ray_cluster: Cluster, mesh_1d: Any):
    step = parallelize(lambda x: x + 1, cluster=ray_cluster, mesh=mesh_1d)
    with pytest.raises(ValueError, match="mesh='x:8'"):
        step(np.ones(8, np.float32))
