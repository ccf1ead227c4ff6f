"""Which hosts a Ray cluster has; connects to a running one, and never starts one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A host with this resource offers as many virtual CPU devices; `autopar launch` and
# `ray start --resources='{"autopar_devices": 4}'` set it.
VIRTUAL_DEVICES = "autopar_devices"
_ACCELERATOR = "accelerator_type:"
_CONNECT_SECONDS = 5.0
_REMEDY = (
    "start one with `ray start --head` (and `ray start --address=...` on the other "
    "hosts), or try a script on virtual hosts of this machine with `autopar launch "
    "--hosts 2 --devices-per-host 4 train.py`"
)


@dataclass(frozen=True)
class HostDevices:
    """One host: its address, and the devices it offers of one platform."""

    node_id: str
    address: str
    platform: str
    num_devices: int
    kind: str = ""


def import_ray() -> Any:
    """The ray package.

    Raises:
      ImportError: it is not installed; names the extra.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"Running on the hosts of a Ray cluster needs ray, but importing it failed "
            f"({error}); install it with pip install 'autopar[ray]'."
        ) from error
    return ray


def connect(address: str | None) -> str:
    """Connect this process to a running cluster, once; its address.

    `None` is the cluster that this process is connected to, else the one that
    RAY_ADDRESS names, else one that runs on this machine.

    Raises:
      ConnectionError: there is none.
      ValueError: this process is connected to another one.
    """
    ray = import_ray()
    if ray.is_initialized():
        found = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", found):
            raise ValueError(
                f"A process is in one Ray cluster at a time, but this one is connected "
                f"to {found} and the address is {address}; call ray.shutdown() first."
            )
        return found
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_somebody_listens(wanted)
    try:
        ray.init(address=wanted, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"There must be a Ray cluster to run on, but at {wanted!r} is none that "
            f"answers ({error}); {_REMEDY}."
        ) from error
    return ray.get_runtime_context().gcs_address


def _check_somebody_listens(address: str) -> None:
    """Ray itself waits for half a minute before it gives an address up."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"There must be a Ray cluster to run on, but nothing listens at {address} "
            f"({error}); {_REMEDY}."
        ) from None


def find_hosts(
    address: str | None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    platform: str | None = None,
) -> tuple[str, tuple[HostDevices, ...]]:
    """The cluster's address, and hosts of it with equally many devices each.

    All hosts that have devices of the platform, unless `num_hosts` asks for fewer; all
    of their devices, unless `devices_per_host` does. The platform is that of the
    accelerators, or `cpu` where there are none.

    Raises:
      ConnectionError, ImportError: see `connect`.
      ValueError: too few hosts or devices; says what is there.
    """
    found = connect(address)
    nodes = [node for node in import_ray().nodes() if node["Alive"]]
    return found, choose_hosts(nodes, num_hosts, devices_per_host, platform)


def choose_hosts(
    nodes: Sequence[Mapping[str, Any]],
    num_hosts: int | None,
    devices_per_host: int | None,
    platform: str | None,
) -> tuple[HostDevices, ...]:
    """Hosts among what `ray.nodes()` returns; see `find_hosts`."""
    everything = [host for node in nodes for host in _offers(node)]
    if platform is None:
        platforms = [host.platform for host in everything]
        platform = next((p for p in ("gpu", "tpu") if p in platforms), "cpu")
    offered = [host for host in everything if host.platform == platform]
    virtual = [host for host in offered if host.kind == VIRTUAL_DEVICES]
    offered = sorted(virtual or offered, key=lambda h: _place(h.address, h.node_id))
    enough = [h for h in offered if h.num_devices >= (devices_per_host or 1)]
    wanted = num_hosts or max(1, len(enough))
    if len(enough) < wanted:
        there = ", ".join(f"{h.address} with {h.num_devices}" for h in offered)
        needed = f"{wanted} hosts with {devices_per_host or 1} {platform} devices each"
        raise ValueError(
            f"The Ray cluster must have {needed}, but has {there or 'no such host'}; "
            f"add hosts with `ray start --address=...`, or ask for less."
        )
    chosen = enough[:wanted]
    count = devices_per_host or chosen[0].num_devices
    unequal = {h.num_devices for h in chosen} if devices_per_host is None else {count}
    if len(unequal) > 1:
        raise ValueError(
            f"The hosts must have equally many devices, but have "
            f"{[h.num_devices for h in chosen]}; pass devices_per_host={min(unequal)}."
        )
    return tuple(
        HostDevices(h.node_id, h.address, platform, count, h.kind) for h in chosen
    )


def number_hosts(
    node_by_bundle: Mapping[int, str], nodes: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The bundles of a placement group in the order in which `choose_hosts` has hosts.

    `node_by_bundle` is where Ray placed each; `nodes` is what `ray.nodes()` returns.
    """
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}

    def place(bundle: int) -> tuple[str, str]:
        node = node_by_bundle[bundle]
        return _place(address.get(node, ""), node)

    return sorted(node_by_bundle, key=place)


def _place(address: str, node_id: str) -> tuple[str, str]:
    """What hosts are numbered by."""
    return address, node_id


def _offers(node: Mapping[str, Any]) -> list[HostDevices]:
    """What devices a node has, by platform; a plain CPU host is one device."""
    resources: Mapping[str, float] = node["Resources"]
    kinds = [name for name in resources if name.startswith(_ACCELERATOR)]
    kind = kinds[0].removeprefix(_ACCELERATOR) if kinds else ""
    where = node["NodeID"], node["NodeManagerAddress"]
    offers = [
        HostDevices(*where, name.lower(), int(resources[name]), kind)
        for name in ("GPU", "TPU")
        if resources.get(name, 0) >= 1
    ]
    virtual = int(resources.get(VIRTUAL_DEVICES, 0))
    if virtual:
        offers.append(HostDevices(*where, "cpu", virtual, VIRTUAL_DEVICES))
    elif resources.get("CPU", 0):
        offers.append(HostDevices(*where, "cpu", 1))
    return offers
