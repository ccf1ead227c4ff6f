"""Which hosts of a Ray cluster are used, from what Ray says of its nodes."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_discovery import VIRTUAL_DEVICES, choose_hosts, number_hosts
from autopar.errors import WorkerError
from autopar.runtime.ray_job import HostFacts, check_alike, own_versions


def node(number: int, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": f"node{number}",
        "NodeManagerAddress": f"10.0.0.{number}",
        "Resources": resources,
    }


GPU_HOSTS = [
    node(2, CPU=8, GPU=4, **{"accelerator_type:H100": 1}),
    node(1, CPU=8, GPU=4, **{"accelerator_type:H100": 1}),
    node(3, CPU=16),
]


def test_accelerators_come_first_in_the_order_of_addresses():
    hosts = choose_hosts(GPU_HOSTS, None, None, None)
    assert [host.address for host in hosts] == ["10.0.0.1", "10.0.0.2"]
    assert {(h.platform, h.num_devices, h.kind) for h in hosts} == {("gpu", 4, "H100")}


def test_a_part_of_the_cluster_can_be_asked_for():
    (host,) = choose_hosts(GPU_HOSTS, 1, 2, "gpu")
    assert host.num_devices == 2


def test_a_plain_cpu_host_is_one_device():
    hosts = choose_hosts(GPU_HOSTS, None, None, "cpu")
    assert [host.num_devices for host in hosts] == [1, 1, 1]


def test_virtual_hosts_are_preferred_to_plain_ones():
    nodes = [node(1, CPU=2), node(2, CPU=2, **{VIRTUAL_DEVICES: 4})]
    (host,) = choose_hosts(nodes, None, None, None)
    assert (host.address, host.num_devices) == ("10.0.0.2", 4)


@pytest.mark.parametrize(
    ("num_hosts", "devices", "text"),
    [
        (3, None, "must have 3 hosts with 1 gpu devices each, but has 10.0.0.1 with 4"),
        (2, 8, "must have 2 hosts with 8 gpu devices each, but has 10.0.0.1 with 4"),
    ],
)
def test_too_little_says_what_is_there_and_what_is_needed(
    num_hosts: int, devices: int | None, text: str
):
    with pytest.raises(ValueError, match=text):
        choose_hosts(GPU_HOSTS, num_hosts, devices, "gpu")


def test_a_missing_platform_says_so():
    with pytest.raises(ValueError, match="tpu devices each, but has no such host"):
        choose_hosts(GPU_HOSTS, None, None, "tpu")


def test_unequal_hosts_say_how_to_use_what_they_share():
    nodes = [node(1, GPU=4), node(2, GPU=8)]
    with pytest.raises(ValueError, match="pass devices_per_host=4"):
        choose_hosts(nodes, None, None, None)
    assert len(choose_hosts(nodes, None, 4, None)) == 2


@pytest.mark.parametrize("addresses", [(1, 2, 3), (3, 1, 2), (7, 7, 7)])
def test_workers_are_numbered_as_their_hosts_were_found(addresses: tuple[int, ...]):
    """Ray puts bundles on hosts in an order of its own; hosts may share an address."""
    names = zip(addresses, "cab", strict=True)
    nodes = [{**node(number, GPU=4), "NodeID": name} for number, name in names]
    found = [host.node_id for host in choose_hosts(nodes, None, None, None)]
    placed = {0: "b", 1: "c", 2: "a"}
    assert [placed[bundle] for bundle in number_hosts(placed, nodes)] == found


def facts(**changes: str) -> HostFacts:
    own = HostFacts("10.0.0.1", 5000, 1, **own_versions())
    return replace(own, **changes)


def test_equal_versions_pass():
    check_alike([facts(), facts()])


@pytest.mark.parametrize("package", ["jax", "python", "autopar"])
def test_a_host_with_another_version_is_named(package: str):
    other = facts(**{package: "0.0.1", "address": "10.0.0.9"})
    with pytest.raises(WorkerError, match=f"host 1 at 10.0.0.9 has {package} 0.0.1"):
        check_alike([facts(), other])


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'autopar\[ray\]'"):
        Cluster.ray()


def test_an_address_without_a_cluster_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError, match=r"ray start --head.*autopar launch"):
        Cluster.ray("127.0.0.1:1")


@pytest.mark.parametrize("name", ["num_hosts", "devices_per_host"])
def test_counts_are_positive(name: str):
    with pytest.raises(ValueError, match="must be an integer above zero, but got 0"):
        Cluster.ray(**{name: 0})  # pyright: ignore[reportArgumentType]
