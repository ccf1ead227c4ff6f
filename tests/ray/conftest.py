"""One local Ray cluster of two virtual hosts for all tests that need one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.clusters.cluster import Cluster
from autopar.runtime.ray_local import local_ray_cluster

NEED_NO_CLUSTER = {
    "test_choose_hosts.py",
    "test_remote_arrays.py",
    "test_transport.py",
    "test_exported_program.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a cluster are marked."""
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.path.name not in NEED_NO_CLUSTER:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Two hosts of four devices."""
    with local_ray_cluster(2, 4) as address:
        yield Cluster.ray(address)
