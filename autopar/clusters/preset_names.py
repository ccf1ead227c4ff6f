"""The names of cluster presets: hosts x devices x kind, or slices * kind : shape."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.clusters.hardware import nearest
from autopar.clusters.ici import SLICES, SliceShape, check_shape


def read_preset_name(
    name: str, kinds: Sequence[str]
) -> tuple[str, int | None, int | None]:
    """The kind, and the numbers of hosts and of devices of each that are named.

    Raises:
      ValueError: the name is malformed, or the kind none of `kinds`.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w.-]*)", name.strip())
    if not match:
        raise ValueError(
            "a preset is called hosts x devices x kind, such as '8x8xH100', but "
            f"got {name!r}; kinds are {', '.join(kinds)}."
        )
    first, second, kind = match.groups()
    by_lower = {known.lower(): known for known in kinds}
    if kind.lower() not in by_lower:
        raise ValueError(
            f"a preset's kind must be one of {', '.join(kinds)}, but got {kind!r}"
            f"{nearest(kind, kinds)}; describe other devices in a file for "
            "Cluster.load."
        )
    hosts, devices = (first, second) if second else (None, first)
    return (
        by_lower[kind.lower()],
        None if hosts is None else int(hosts),
        None if devices is None else int(devices),
    )


def check_one_host(kind: str, devices: int | None, preset: Mapping[str, Any]) -> None:
    """Refuses `64xH100`: NVLink joins the GPUs of a host as it is sold.

    TPUs of a slice and virtual CPU devices may be as many as one likes.

    Raises:
      ValueError: there are more devices than a host of the kind has.
    """
    sold = preset["devices_per_host"]
    is_joined = preset["host_link"]["name"].startswith("NV")
    if devices is None or devices <= sold or not is_joined:
        return
    raise ValueError(
        f"'{devices}x{kind}' is one host of {devices} devices, but a host of {kind} "
        f"has {sold}; use '{-(-devices // sold)}x{sold}x{kind}' for hosts of {sold}, "
        f"or '1x{devices}x{kind}' if one host has them all."
    )


def read_slice_name(name: str) -> tuple[SliceShape, int]:
    """A slice of TPUs, and how many there are: `4*v5e:16x16`.

    Raises:
      ValueError: the name is malformed, or there are no such slices.
    """
    match = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)", name.strip())
    if not match or int(match[1] or 1) < 1:
        raise ValueError(
            f"Slices of TPUs are called slices * kind : chips along each axis, such as "
            f"'v5e:16x16' or '4*v5e:16x16', but got {name!r}."
        )
    kinds = {known.lower(): known for known in SLICES}
    kind = kinds.get(match[2].lower(), match[2])
    chips = check_shape(kind, [int(length) for length in match[3].split("x")])
    return SliceShape(kind, chips), int(match[1] or 1)


def slice_fields(
    preset: Mapping[str, Any], shape: SliceShape, slices: int
) -> dict[str, Any]:
    """What a cluster of slices has other than the preset of its kind."""
    fields = {
        "name": str(shape) if slices == 1 else f"{slices}*{shape}",
        "num_hosts": slices,
        "devices_per_host": shape.size,
        "ici": shape.chips,
    }
    if slices > 1:
        fields["network_link"] = {
            "name": "data-centre network",
            "alpha_seconds": 10 * preset["host_link"]["alpha_seconds"],
            "bandwidth": SLICES[shape.kind].slice_bandwidth,
            "efficiency": preset["host_link"]["efficiency"],
        }
    return fields
