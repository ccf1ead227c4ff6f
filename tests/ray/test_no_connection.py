"""Where hosts cannot connect to each other, all goes through Ray, with equal values."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.runtime import ray_workers
from benchmarks.models import build

NO_SERVER = """
import sys, types

def start_transfer_server(*_, **__):
    raise RuntimeError("no server on this network")

module = types.ModuleType("jax.experimental.transfer")
module.start_transfer_server = start_transfer_server
sys.modules[module.__name__] = module
"""


@pytest.fixture
def no_connections(
    monkeypatch: pytest.MonkeyPatch, hosts_run: Callable[[str], None]
) -> None:
    """No transfer server starts on a host, and the driver reaches none but by Ray."""

    def refuse(*_: Any) -> Any:
        raise ConnectionRefusedError("a firewall")

    hosts_run(NO_SERVER)
    monkeypatch.setattr(ray_workers, "dial", refuse)


@pytest.mark.slow  # workers start
@pytest.mark.usefixtures("no_connections")
def test_two_stages_equal_one_device(
    ray_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    workload = build("mlp", optimizer="adamw_clip")
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    step = autopar.parallelize(workload.step, method=method, cluster=ray_cluster)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    got = expected = state, None
    with caplog.at_level(logging.WARNING, "autopar"):
        for _ in range(3):
            got = step(got[0], batch)
            expected = jax.jit(workload.step)(expected[0], batch)
    for a, b in zip(*map(jax.tree.leaves, (autopar.fetch(got), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    for rank in range(2):
        assert f"what host {rank}" in caplog.text, "what it reads of the other stage"
    assert "goes through Ray's object store" in caplog.text
    assert "no transfer server starts there (no server on this netw" in caplog.text
    assert "calls go through Ray, which takes longer" in caplog.text
    step.close()
