"""The physical machines: hosts, devices and links, from presets, files or this process.

A link's bandwidth is what one device sends in one direction while every device of its
host sends. Hosts share their network cards: a ring that leaves a host at one device
while its neighbours stay silent gets the bandwidth of all the host's cards
(`Cluster.link`).
"""

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.clusters.hardware import (
    AxisLink,
    Device,
    Link,
    check_fraction,
    check_integer,
    check_positive,
)
from autopar.clusters.ici import SLICES, SliceShape, standard_shape
from autopar.clusters.joined import JoinedFile, join_clusters
from autopar.clusters.links import link_of_groups
from autopar.clusters.measured_links import measured_on, with_group_sizes
from autopar.clusters.preset_names import (
    check_one_host,
    read_preset_name,
    read_slice_name,
    slice_fields,
)
from autopar.clusters.ray_hosts import OnFailure
from autopar.clusters.ray_hosts import RayHosts as RayHosts
from autopar.clusters.toml_table import build, check_fields, read_toml, table_at
from autopar.errors import ClusterFileError, FallbackWarning
from autopar.sharding.mesh import MeshShape

_PRESETS = Path(__file__).parent
_STAND_INS = {"gpu": "A100", "tpu": "v5e", "cpu": "CPU"}


@dataclass(frozen=True)
class Cluster:
    """Hosts of equally many devices, which are numbered host by host.

    Attributes:
      name: what it is called, such as `8x8xH100`.
      num_hosts: number of hosts.
      devices_per_host: number of devices in each.
      device: the device.
      host_link: joins the devices of a host.
      network_link: joins hosts.
      launch_seconds: what starting a collective costs.
      kernel_seconds: what starting an operator that fuses with no other costs.
      visible_fraction: of the seconds of gathering parameters and reducing gradients,
        the part that a step waits for; the rest runs while it computes. 1: all, which
        is right where nobody measured, and where one device's compute and sending share
        cores, as on CPUs.
      source: where the numbers are from.
      ray_hosts: the Ray hosts that run its programs; this process, if None.
      ici: the chips of a slice of TPUs along each axis of their interconnect, where a
        host is one slice; empty: see `slice_shape`.
      parts: clusters of equal hosts, where it has several kinds; all else is then what
        the least of them has (`joined.py`).

    Raises:
      ValueError: a count is not a positive integer, a time is negative, or a value is
        not of its kind.
    """

    name: str
    num_hosts: int
    devices_per_host: int
    device: Device
    host_link: Link
    network_link: Link
    launch_seconds: float
    kernel_seconds: float
    source: str
    ray_hosts: RayHosts | None = None
    visible_fraction: float = 1.0
    parts: tuple["Cluster", ...] = ()
    ici: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_integer("num_hosts", self.num_hosts)
        check_integer("devices_per_host", self.devices_per_host)
        check_positive("launch_seconds", self.launch_seconds, zero=True)
        check_positive("kernel_seconds", self.kernel_seconds, zero=True)
        check_fraction("visible_fraction", self.visible_fraction)

    @property
    def num_devices(self) -> int:
        """Number of devices in all."""
        return self.num_hosts * self.devices_per_host

    @property
    def slice_shape(self) -> SliceShape | None:
        """The slices that TPUs are in; None for others, and for an unusual number.

        Hosts joined by the links of their devices are one slice in the standard shape,
        else each is one.
        """
        kind, is_one = self.device.kind, self.network_link == self.host_link
        if self.parts or kind not in SLICES:
            return None
        number = self.num_devices if is_one else self.devices_per_host
        chips = self.ici or standard_shape(kind, number)
        return SliceShape(kind, chips) if chips else None

    @classmethod
    def local(cls) -> "Cluster":
        """The devices that this process sees, at their preset's constants.

        The constants of CPU devices do not depend on the machine, so that a plan for
        virtual devices is the same everywhere; only their memory is the machine's,
        shared out. An unknown accelerator gets those of a similar one, and a
        `FallbackWarning`.

        Raises:
          ValueError: processes see unequal numbers of devices.
        """
        import jax

        devices = jax.devices()
        num_hosts = len({device.process_index for device in devices})
        if len(devices) % num_hosts:
            raise ValueError(
                "every process must see as many devices as the others, but "
                f"{len(devices)} devices are on {num_hosts} processes; describe them "
                "in a file for Cluster.load."
            )
        first = devices[0]
        preset = _preset_of(first.device_kind, first.platform)
        cluster = dataclasses.replace(
            preset,
            name=f"local {num_hosts}x{len(devices) // num_hosts}x{preset.device.kind}",
            num_hosts=num_hosts,
            devices_per_host=len(devices) // num_hosts,
        )
        memory_bytes = _local_memory_bytes(first, cluster)
        device = dataclasses.replace(cluster.device, memory_bytes=memory_bytes)
        return dataclasses.replace(cluster, device=device)

    @classmethod
    def preset(cls, name: str) -> "Cluster":
        """A cluster of known devices, whether or not one has it.

        Args:
          name: hosts x devices of each host x kind: `"8x8xH100"`; `"8xH100"` is one
            host and `"H100"` one host as it is sold; `"2x8xH100+2x8xA100"` has both. A
            host of more GPUs than are sold is written in full: `"1x72xB200"`. A slice
            of TPUs is its kind and the chips along each axis of its interconnect,
            `"v5e:16x16"`; `"4*v5e:16x16"` has four, each of which counts as a host.

        Raises:
          ValueError: the name is malformed, the kind unknown, or one host too large.
        """
        if "+" in name:
            parts = [cls.preset(part) for part in name.split("+")]
            return join_clusters(parts, name.strip())
        kinds = tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))
        if ":" in name:
            shape, slices = read_slice_name(name)
            table = read_toml(_PRESETS / f"{shape.kind}.toml")
            fields = slice_fields(table, shape, slices)
            return _from_table(table | fields, f"cluster preset {name}")
        kind, hosts, devices = read_preset_name(name, kinds)
        table = read_toml(_PRESETS / f"{kind}.toml")
        if hosts is None:
            check_one_host(kind, devices, table)
        table["name"] = name.strip()
        table["num_hosts"] = 1 if hosts is None else hosts
        if devices is not None:
            table["devices_per_host"] = devices
        table["host_link"]["measured"] = measured_on(table["host_link"]["name"])
        return _from_table(table, f"cluster preset {name}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Cluster":
        """A cluster described in a TOML file; `autopar/clusters/*.toml` are examples.

        Fields are those of `Cluster`, with tables `[device]`, `[device.peak_flops]`,
        `[host_link]` and `[network_link]`. The network link gives either `bandwidth`
        (bytes/s a device) or `host_bandwidth` (bytes/s of all cards of a host), and may
        be left out where there is one host.

        Raises:
          ClusterFileError: the file cannot be read, or a field is missing, unknown, of
            the wrong type or sign, or contradicts another.
        """
        return _from_table(read_toml(Path(path)), f"cluster file {os.fspath(path)}")

    @classmethod
    def ray(
        cls,
        address: str | None = None,
        *,
        num_hosts: int | None = None,
        devices_per_host: int | None = None,
        platform: str | None = None,
        step_seconds: float = 600.0,
        silent_seconds: float = 8.0,
        on_failure: OnFailure = "replan",
        wait_seconds: float = 600.0,
        steps_ahead: int = 0,
    ) -> "Cluster":
        """The hosts of a running Ray cluster; steps planned for it run there.

        Connects this process to the cluster if need be, and never starts one.

        Args:
          address: of the cluster; if left out, the one that this process is connected
            to, else that of RAY_ADDRESS, else one that runs on this machine.
          num_hosts: how many hosts to use; all if left out.
          devices_per_host: how many devices of each; all if left out. A CPU host has
            one, unless it was started with the resource `autopar_devices`.
          platform: `cpu`, `gpu` or `tpu`; that of the accelerators if left out.
          step_seconds: how long a step may take until its hosts are given up as hung.
          silent_seconds: a host that gives no sign of life for so long while a step
            runs is given up.
          on_failure: what `autopar.Training` does when a host is lost. "replan": plans
            for the hosts that are left. "wait": waits until there are as many again.
            "raise": raises. A step that is called without it always raises.
          wait_seconds: how long it waits for hosts.
          steps_ahead: how many steps may be under way when a call returns, 0 to 8. With
            1 or more metrics are `DistributedArray`s, and errors may come later.

        Raises:
          ConnectionError: no Ray cluster answers.
          ImportError: ray is not installed.
          ValueError: the cluster has too few hosts or devices, or an argument is none
            of those above.
        """
        from autopar.clusters.ray_discovery import find_hosts

        for name, count in (("num_hosts", num_hosts), ("devices", devices_per_host)):
            if count is not None:
                check_integer(name, count)
        found, hosts = find_hosts(address, num_hosts, devices_per_host, platform)
        first, number = hosts[0], hosts[0].num_devices
        preset = _preset_of_accelerator(first.kind, first.platform)
        waits = step_seconds, silent_seconds, on_failure, wait_seconds, steps_ahead
        nodes = tuple((each.node_id, each.address) for each in hosts)
        return dataclasses.replace(
            preset,
            devices_per_host=number,
            ray_hosts=RayHosts(found, first.platform, *waits, nodes),
        ).with_hosts(len(hosts))

    def with_hosts(self, number: int) -> "Cluster":
        """A Ray cluster with so many of its hosts."""
        size = f"{number}x{self.devices_per_host}x{self.device.kind}"
        return dataclasses.replace(self, name=f"ray {size}", num_hosts=number)

    def link(self, mesh: MeshShape, axes: Iterable[str]) -> AxisLink:
        """The link that a collective over some mesh axes uses.

        The mesh's devices are the cluster's first ones, in row-major order; in
        slices of TPUs axes are laid along those of the interconnect (`slice_shape`),
        and a group uses the links of those that it lies along. Groups that stay in a
        host use its link. Of a group that leaves hosts one ring edge crosses each
        host's cards, so these are shared by as many rings as leave the host: the groups
        of the other axes inside it. In an all_to_all every device of a group
        sends to all its devices on other hosts.

        Args:
          mesh: the mesh.
          axes: names of the axes that the collective runs over.

        Raises:
          ValueError: an unknown axis, or a mesh of more devices than the cluster has.
        """
        if mesh.size > self.num_devices:
            raise ValueError(
                f"a mesh cannot hold more devices than its cluster, but {mesh} needs "
                f"{mesh.size} and {self.name} has {self.num_devices}; use smaller axes."
            )
        return link_of_groups(self, mesh.groups(axes), mesh.axis_sizes)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_devices} devices, "
            f"{self.devices_per_host} a host\n"
            f"  device        {self.device}\n"
            f"  within hosts  {self.host_link}\n"
            f"  between hosts {self.network_link}\n"
            f"  launches      collective {self.launch_seconds * 1e6:g} us, "
            f"kernel {self.kernel_seconds * 1e6:g} us\n"
            f"  waited for    {self.visible_fraction:.0%} of gathering parameters and "
            f"reducing gradients"
        )


@cache
def _preset_of(device_kind: str, platform: str) -> Cluster:
    presets = [Cluster.preset(path.stem) for path in _PRESETS.glob("*.toml")]
    starts = {start: each for each in presets for start in each.device.jax_kinds}
    matches = [start for start in starts if device_kind.startswith(start)]
    if matches:
        return starts[max(matches, key=len)]
    stand_in = _STAND_INS.get(platform, "A100")
    if platform != "cpu":
        warnings.warn(
            f"the {platform} {device_kind!r} has no preset, so its speed is taken to "
            f"be that of {stand_in}; describe it in a file for Cluster.load.",
            FallbackWarning,
            stacklevel=3,
        )
    return Cluster.preset(stand_in)


def _preset_of_accelerator(kind: str, platform: str) -> Cluster:
    """The preset of what Ray calls an accelerator, such as `H100` or `TPU-V4`."""
    known = {path.stem.lower(): path.stem for path in _PRESETS.glob("*.toml")}
    name = known.get(kind.lower().removeprefix("tpu-"))
    return Cluster.preset(name) if name else _preset_of(kind, platform)


def _local_memory_bytes(device: Any, cluster: Cluster) -> int:
    if device.platform == "cpu":
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return physical // cluster.devices_per_host
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(limit or cluster.device.memory_bytes)


def cluster_by_name(name: str) -> Cluster | None:
    """The cluster that a plan names, if that is a preset or made of one."""
    try:
        return Cluster.preset(name.removeprefix("local ").removeprefix("ray "))
    except ValueError:
        return None


def _from_table(table: Mapping[str, Any], where: str) -> Cluster:
    """A cluster from nested tables; errors name `where` and the field."""
    table = dict(table)
    if table.pop("overlaps", False):  # in files that an older autopar wrote
        warnings.warn(
            f"{where}: `overlaps` is ignored: compilers order transfers themselves.",
            FallbackWarning,
            stacklevel=4,
        )
    if "parts" in table:
        check_fields(JoinedFile, table, where, "")
        parts = [_from_table(part, where) for part in table["parts"]]
        return join_clusters(parts, table["name"])
    if table.get("num_hosts") == 1 and "host_link" in table:
        table.setdefault("network_link", table["host_link"])
    check_fields(Cluster, table, where, "")
    if "ray_hosts" in table:
        raise ClusterFileError(
            f"{where}: `ray_hosts` cannot be given in a file; use Cluster.ray()."
        )
    device = {**table_at(table, "device", where)}
    device["jax_kinds"] = tuple(device.get("jax_kinds", ()))
    table["ici"] = tuple(table.get("ici", ()))
    network = {**table_at(table, "network_link", where)}
    if "host_bandwidth" in network:
        if "bandwidth" in network:
            raise ClusterFileError(
                f"{where}: `network_link` gives both `bandwidth` (a device) and "
                "`host_bandwidth` (all cards of a host); keep one."
            )
        try:
            check_positive("network_link.host_bandwidth", network["host_bandwidth"])
            check_integer("devices_per_host", table["devices_per_host"])
        except ValueError as error:
            raise ClusterFileError(f"{where}: {error}") from None
        per_host = network.pop("host_bandwidth")
        network["bandwidth"] = per_host / table["devices_per_host"]
    table["device"] = build(Device, device, where, "device.")
    host = table_at(table, "host_link", where)
    table["host_link"] = build(Link, with_group_sizes(host), where, "host_link.")
    network = with_group_sizes(network)
    table["network_link"] = build(Link, network, where, "network_link.")
    return build(Cluster, table, where, "")
