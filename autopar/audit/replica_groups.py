"""Reads the spellings of device groups in optimized HLO text.

{{0,1},{2,3}}                     listed; also (source, target) pairs
{} or nothing                     all devices
[4,2]<=[2,4]T(1,0)                iota: reshape, transpose, cut into rows
mesh['a'=2,'b'=4] {'b'}           along the named axes of a mesh of iota devices
mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}      the same, devices reordered
mesh['a'=8] {'a':(2)4}            along part of an axis: of size 4, after 2
"""

import re
from collections.abc import Sequence
from math import prod

import numpy as np

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*?\)?)\))?(?: ?\{([^}]*)\})?")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

Groups = list[list[int]]


def parse_groups(text: str) -> Groups:
    """Returns the groups that `text` starts with; none of them means all devices.

    Raises:
      ValueError: if the spelling is not one of those above.
    """
    if not text or text.startswith("{}"):
        return []
    if text.startswith("{{"):
        rows = text[: text.index("}}") + 1]
        return [_numbers(row) for row in re.findall(r"\{([\d,]+)", rows)]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if found := _IOTA.match(text):
        num_groups, size = _numbers(found.group(1))
        ids = _iota(found.group(2) or found.group(1), found.group(3))
        return ids.reshape(num_groups, size).tolist()
    raise ValueError(
        "Device groups must be spelled {{...}}, [...]<=[...] or mesh[...], but got "
        f"{text[:60]!r}; add the new spelling to autopar/audit/replica_groups.py."
    )


def _mesh_groups(text: str) -> Groups:
    found = _MESH.match(text)
    assert found, f"Cannot read the mesh in {text[:60]!r}."
    names = re.findall(r"'([^']+)'=(\d+)", found.group(1))
    sizes = {name: int(size) for name, size in names}
    devices = _mesh_devices(found.group(2), tuple(sizes.values()))
    # Every axis becomes one dim, or three where only part of it takes part.
    dims: list[int] = []
    dim_by_axis: dict[str, int] = {}
    chosen = _AXIS.findall(found.group(3) or "")
    cuts = {name: (int(before), int(size)) for name, before, size in chosen if before}
    for name, size in sizes.items():
        before, part = cuts.get(name, (1, size))
        dim_by_axis[name] = len(dims) + 1
        dims += [before, part, size // (before * part)]
    inner = [dim_by_axis[name] for name, _, _ in chosen]
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    group_size = prod(dims[dim] for dim in inner)
    ordered = devices.reshape(dims).transpose(outer + inner)
    return ordered.reshape(-1, group_size).tolist()


def _mesh_devices(text: str | None, sizes: Sequence[int]) -> np.ndarray:
    if not text:
        return np.arange(prod(sizes))
    if found := _IOTA.match(text):
        return _iota(found.group(2) or found.group(1), found.group(3)).reshape(-1)
    return np.array(_numbers(text))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    shape = _numbers(dims)
    ids = np.arange(prod(shape)).reshape(shape)
    return ids.transpose(_numbers(permutation)) if permutation else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
