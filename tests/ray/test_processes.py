"""CLI-1 and CLI-4: one process, many processes and a driver of many: one result.

The one process is that of the tests.
"""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import ShardParallel
from autopar.steps.parallel_plan import Plan
from tests.ray import f3_training

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "ray" / "spmd_script.py"


@pytest.fixture(scope="module")
def remote_step(ray_cluster: Cluster) -> Any:
    method, mesh = ShardParallel(), "data:2;model:4"
    return parallelize(f3_training.step, method=method, mesh=mesh, cluster=ray_cluster)


@pytest.fixture(scope="module")
def plan(remote_step: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    remote_step.plan(*f3_training.arguments()).save(path)
    return path


@pytest.fixture(scope="module")
def together(plan: Path) -> list[dict[str, Any]]:
    """What each of two processes printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(SCRIPT), str(plan)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_a_script_in_two_processes_equals_that_in_one(
    plan: Path, together: list[dict[str, Any]]
):
    alone = f3_training.losses(parallelize(f3_training.step, plan=Plan.load(plan)))
    for found in together:
        assert found["devices"] == [4, 8]
        assert found["sum"] == sum(range(64))
        assert found["losses"] == pytest.approx(alone, rel=1e-5)
    assert together[0]["losses"] == together[1]["losses"]
    assert alone[0] > alone[-1], "it learns"


def test_every_process_compiles_the_same_program(together: list[dict[str, Any]]):
    assert together[0]["hlo"] == together[1]["hlo"]


def test_stages_across_processes_are_refused(together: list[dict[str, Any]]):
    for each in together:
        assert "one of 2 processes" in each["refused"]


def test_every_process_plans_for_itself_and_alike(together: list[dict[str, Any]]):
    first, second = together
    assert first["solved"] == second["solved"] >= 2
    assert first["searched"] == second["searched"]
    assert first["searched"] == pytest.approx(16 * 64 * math.tanh(1), rel=1e-5)


def test_the_ray_driver_and_processes_run_one_plan_to_equal_losses(
    remote_step: Any, together: list[dict[str, Any]]
):
    assert f3_training.losses(remote_step) == together[0]["losses"]
