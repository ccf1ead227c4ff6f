"""A driver that is killed leaves no workers behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.runtime.ray_local import LocalHosts
from tests.ray.test_failures import is_alive, wait_until

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
import jax
import autopar
from benchmarks.models import build

workload = build("mlp", num_layers=4)
cluster = autopar.Cluster.ray(sys.argv[1], num_hosts=2)
method = autopar.PipelineParallel(num_stages=4, num_microbatches=4)
step = autopar.parallelize(workload.step, cluster=cluster, method=method)
state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
state, _ = step(state, batch)
(pipelined,) = step._running()
print(*[facts.process_id for facts in pipelined.execute.workers.facts], flush=True)
while True:
    state, _ = step(state, batch)
"""


@pytest.mark.slow  # a process starts, and workers
def test_no_worker_outlives_its_driver(ray_hosts: LocalHosts):
    path = os.pathsep.join([str(ROOT), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, ray_hosts.address],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    lines = iter(driver.stdout.readline, "")
    workers = [int(each) for each in next(lines).split()]
    assert len(workers) == 2 and all(map(is_alive, workers))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not any(map(is_alive, workers)), seconds=30.0)
