"""With which hosts a training goes on."""

import dataclasses
import re
from typing import Any

import pytest

from autopar.clusters.cluster import Cluster, RayHosts
from autopar.errors import HostLostError
from autopar.runtime import ray_actors
from autopar.runtime.ray_actors import cluster_left, hosts_lost


def cluster_of(num_hosts: int, **waits: Any) -> Cluster:
    hosts = RayHosts("10.0.0.1:6379", "cpu", 600.0, **waits)
    preset = Cluster.preset(f"{num_hosts}x4xCPU")
    return dataclasses.replace(preset, ray_hosts=hosts)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hosts live each time that Ray is asked; the last number stays."""
    numbers: list[int] = []

    def find_hosts(*_: Any) -> tuple[str, tuple[None, ...]]:
        number = numbers.pop(0) if len(numbers) > 1 else numbers[0]
        if not number:
            raise ValueError("no such host")
        return "10.0.0.1:6379", (None,) * number

    monkeypatch.setattr(ray_actors, "find_hosts", find_hosts)
    monkeypatch.setattr(ray_actors, "_LOOK_EVERY_SECONDS", 0.01)
    return numbers


@pytest.mark.parametrize(("number", "used"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_the_plan_is_for_those_that_are_left(alive: list[int], number: int, used: int):
    alive[:] = [number]
    left = cluster_left(cluster_of(3))
    assert (left.num_hosts, left.name) == (used, f"ray {used}x4xCPU")
    assert left.ray_hosts == cluster_of(3).ray_hosts


def test_one_host_is_waited_for(alive: list[int]):
    alive[:] = [0, 0, 1]
    assert cluster_left(cluster_of(3)).num_hosts == 1


def test_as_many_as_there_were_are_waited_for_if_so_said(alive: list[int]):
    alive[:] = [1, 2, 3]
    assert cluster_left(cluster_of(3, on_failure="wait")).num_hosts == 3


def test_the_wait_has_an_end(alive: list[int]):
    alive[:] = [2]
    with pytest.raises(HostLostError, match=r"^3 hosts .* after 0\.05 s there are 2;"):
        cluster_left(cluster_of(3, on_failure="wait", wait_seconds=0.05))


def test_hosts_that_went_before_workers_start_are_named(
    alive: list[int], monkeypatch: pytest.MonkeyPatch
):
    class Ray:
        @staticmethod
        def nodes() -> list[dict[str, Any]]:
            return [{"NodeID": "a" * 20, "Alive": True}, {"NodeID": "b", "Alive": 0}]

    monkeypatch.setattr(ray_actors, "import_ray", lambda: Ray)
    alive[:] = [1]
    nodes = ("a" * 20, "10.0.0.1"), ("b" * 20, "10.0.0.2")
    lost = hosts_lost(cluster_of(2, nodes=nodes))
    assert lost.rank == 1
    told = r"the host at 10\.0\.0\.2 \(Ray's node bbbbbbbb\) is gone: 1 of 2 are left;"
    assert re.search(told, str(lost))


@pytest.mark.parametrize("name", ["step_seconds", "silent_seconds", "wait_seconds"])
def test_times_are_above_zero(name: str):
    waits: dict[str, Any] = {"step_seconds": 600.0, name: 0.0}
    with pytest.raises(ValueError, match=name):
        RayHosts("10.0.0.1:6379", "cpu", **waits)
