"""One local Ray cluster of two virtual hosts for all tests that need one."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from autopar.clusters.cluster import Cluster
from autopar.methods.methods import Method
from autopar.runtime import ray_actors, ray_workers
from autopar.runtime.ray_local import LocalHosts, local_ray_hosts
from tests.ray.trainings import MODELS, Training

NEED_NO_CLUSTER = {
    "test_channel.py",
    "test_choose_hosts.py",
    "test_reading.py",
    "test_remote_arrays.py",
    "test_transport.py",
    "test_watch.py",
    "test_hosts_left.py",
    "test_exported_program.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a cluster are marked; those that end its workers come last."""
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.path.name not in NEED_NO_CLUSTER:
            item.add_marker(pytest.mark.ray)
    faults = Path(__file__).with_name("test_failures.py")
    items.sort(key=lambda item: item.path == faults)


@pytest.fixture(scope="session")
def ray_hosts() -> Iterator[LocalHosts]:
    """Two hosts of four devices; a test may add others, and takes them away again.

    Their workers stay for the tests to come, until a test ends them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers, "_live", {})
        with local_ray_hosts(2, 4) as hosts:
            yield hosts


@pytest.fixture
def hosts_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Has workers, which start in this test, run a text before all else."""
    monkeypatch.setattr(ray_workers, "_live", {})
    environment = ray_actors._environment

    def run(text: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(text)
        there = {"PYTHONPATH": str(tmp_path)}
        monkeypatch.setattr(
            ray_actors, "_environment", lambda *given: {**environment(*given), **there}
        )

    return run


@pytest.fixture(scope="session")
def ray_cluster(ray_hosts: LocalHosts) -> Cluster:
    """The two hosts, which may be silent for long where a machine is loaded."""
    # Tests that were run before may have added others, and not taken them away yet.
    return Cluster.ray(ray_hosts.address, num_hosts=2, silent_seconds=60.0)


@pytest.fixture(scope="session")
def trainings(ray_cluster: Cluster) -> Callable[[str, Method], Training]:
    """A model under a method: planned and compiled once."""
    return cache(lambda model, method: Training(MODELS[model](), method, ray_cluster))
