"""Slices of TPUs: their names, where a mesh lies in them, and how quickly they send."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.clusters.cluster_file import to_toml
from autopar.clusters.ici import SLICES, SliceShape, standard_shape
from autopar.sharding.mesh import parse_mesh
from autopar.targets.target import Target

Cluster = autopar.Cluster


def lengths(cluster: str, mesh: str, axis: str) -> list[int]:
    """How far the first group of a mesh axis reaches along each ICI axis."""
    shape, parsed = Cluster.preset(cluster).slice_shape, parse_mesh(mesh)
    assert shape is not None
    group = list(parsed.groups((axis,))[0])
    places = shape.places(parsed.axis_sizes)[group]
    return (places.max(axis=0) - places.min(axis=0) + 1).tolist()


@pytest.mark.parametrize(
    ("name", "hosts", "devices", "chips"),
    [
        ("v5e:16x16", 1, 256, (16, 16)),
        ("4*V5E:16x16", 4, 256, (16, 16)),
        ("v5p:2x2", 1, 4, (2, 2, 1)),
        ("tpu7x:2x2x2", 1, 16, (2, 2, 2)),
        ("8xv5e", 1, 8, (2, 4)),
        ("4x8xv6e", 4, 8, (4, 8)),
        ("v4", 1, 4, (2, 2, 1)),
        ("2x8xtpu7x", 2, 8, (2, 2, 2)),
    ],
)
def test_a_name_says_or_implies_the_shape_of_a_slice(
    name: str, hosts: int, devices: int, chips: tuple[int, ...]
) -> None:
    cluster = Cluster.preset(name)
    assert (cluster.num_hosts, cluster.devices_per_host) == (hosts, devices)
    assert cluster.slice_shape == SliceShape(cluster.device.kind, chips)


def test_what_is_in_no_slice_has_no_shape() -> None:
    for name in ("8xH100", "3xv5e", "1x512xv5e", "8xv5e+8xv6e"):
        assert Cluster.preset(name).slice_shape is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e:2x", "such as 'v5e:16x16' or '4\\*v5e:16x16', but got 'v5e:2x'"),
        ("0*v5e:2x4", "but got '0\\*v5e:2x4'"),
        ("v5e:2x2x2", "has 2 axes of 1 to 16 chips, but got '2x2x2'; use .* 'v5e:2x4'"),
        ("v5e:32x16", "got '32x16'"),
        ("H100:2x4", "got a shape for 'H100'; write hosts x devices x kind"),
    ],
)
def test_a_shape_that_no_slice_has_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster.preset(name)


def test_a_cluster_of_slices_is_kept_in_a_file(tmp_path: Any) -> None:
    cluster = Cluster.preset("2*v5e:4x8")
    path = tmp_path / "slices.toml"
    path.write_text(to_toml(cluster))
    assert Cluster.load(path) == cluster


@pytest.mark.parametrize(
    ("cluster", "mesh", "reaches"),
    [
        ("v5e:2x4", "x:2;y:4", {"x": [2, 1, 1], "y": [1, 4, 1]}),
        ("v5e:2x4", "x:4;y:2", {"x": [1, 4, 1], "y": [2, 1, 1]}),
        ("v5e:16x16", "x:8;y:32", {"x": [15, 1, 1], "y": [2, 16, 1]}),
        ("v5p:4x4x8", "x:8;y:16", {"x": [1, 1, 8, 1], "y": [4, 4, 1, 1]}),
        ("2*v5e:4x4", "s:2;x:4;y:4", {"x": [4, 1, 1], "y": [1, 4, 1]}),
    ],
)
def test_mesh_axes_lie_along_ici_axes(
    cluster: str, mesh: str, reaches: dict[str, list[int]]
) -> None:
    assert {axis: lengths(cluster, mesh, axis) for axis in reaches} == reaches


@pytest.mark.parametrize("kind", SLICES)
def test_a_mesh_has_each_device_of_a_slice_once(kind: str) -> None:
    shape = SliceShape(kind, standard_shape(kind, 32))
    for sizes in [(32,), (4, 8), (8, 4), (2, 4, 4), (16, 2)]:
        places = shape.places(sizes)
        assert len(np.unique(places, axis=0)) == shape.size
        assert places.max(axis=0).tolist() == [n - 1 for n in shape.lengths]


def test_tpus_of_this_process_are_laid_out_so_and_others_as_they_come() -> None:
    def device(x: int, y: int, **more: int) -> Any:
        return SimpleNamespace(coords=[x, y, 0], core_on_chip=0, **more)

    chips = [device(x, y) for y in range(4) for x in range(2)]
    shape = SliceShape("v5e", (2, 4))
    found = shape.laid_out(chips, (2, 4))
    assert [each.coords[:2] for each in found] == [
        [x, y] for x in (0, 1) for y in range(4)
    ]
    slices = [device(*d.coords[:2], slice_index=s) for s in (7, 9) for d in chips]
    assert [d.slice_index for d in shape.laid_out(slices, (2, 8))] == [7] * 8 + [9] * 8
    other = [device(x, 0) for x in range(8)]
    assert shape.laid_out(other, (8,)) == other
    assert shape.laid_out(["cpu"] * 8, (2, 4)) == ["cpu"] * 8


def seconds_per_gigabyte(cluster: str, mesh: str, axes: str) -> float:
    made = Cluster.preset(cluster)
    return made.link(parse_mesh(mesh), axes.split()).seconds_per_byte * 0.9e9


@pytest.mark.parametrize(
    ("cluster", "mesh", "axes", "bandwidth"),
    [
        ("v5e:16x16", "x:16;y:16", "x", 100),  # a ring both ways
        ("v5e:16x16", "x:16;y:16", "x y", 200),  # along both axes
        ("v5e:16x16", "x:32;y:8", "y", 50),  # a half of an axis is no ring
        ("v5e:16x16", "x:16;y:2;z:8", "y", 100 / 8),  # eight share its links
        ("v5e:4x8", "x:4;y:8", "x", 50),  # its ends are not joined
        ("v5p:4x4x4", "x:4;y:16", "x", 200),
        ("v5p:4x4x4", "x:4;y:16", "y", 400),
        ("v5p:2x4x4", "x:2;y:4;z:4", "y", 100),  # no whole cubes: no rings
        ("8xv5e", "x:8", "x", 100),
        ("4*v5e:16x16", "s:4;x:256", "s", 3.125),
        ("4*v5e:16x16", "s:4;x:256", "x", 200),
    ],
)
def test_a_group_sends_along_the_axes_that_it_lies_along(
    cluster: str, mesh: str, axes: str, bandwidth: float
) -> None:
    assert 1 / seconds_per_gigabyte(cluster, mesh, axes) == pytest.approx(bandwidth)


def test_all_to_all_is_as_slow_as_the_middle_of_its_longest_axis() -> None:
    def exchange(cluster: str, mesh: str) -> float:
        link = Cluster.preset(cluster).link(parse_mesh(mesh), ("x",))
        return 1 / (link.seconds_per_sent_byte("all_to_all") * 0.9e9)

    assert exchange("v5e:16x16", "x:16;y:16") == pytest.approx(100 * 4 / 16)
    assert exchange("v5e:4x4", "x:4;y:4") == pytest.approx(50)
    assert exchange("v5e:2x4", "x:2;y:4") == pytest.approx(50)


@pytest.mark.parametrize(
    ("preset", "num_devices", "name", "topology"),
    [
        ("v5e:2x4", None, "v5e:2x4", {"topology_name": "v5e:2x4"}),
        ("2x8xv5e", None, "v5e:4x4", {"topology_name": "v5e:4x4"}),
        (
            *("4*v5e:16x16", 512, "2*v5e:16x16"),
            {"topology_name": "v5e:16x16", "num_slices": 2},
        ),
        ("4*v5e:16x16", 64, "64 of v5e:16x16", {"topology_name": "v5e:16x16"}),
        (
            *("2xv5e", None, "v5e:2x1"),
            {"topology_name": "v5e:2x1", "chips_per_host_bounds": (2, 1, 1)},
        ),
        (
            *("v4:2x2x1", None, "v4:2x2x1"),
            {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"},
        ),
    ],
)
def test_slices_or_a_part_of_one_are_a_topology(
    preset: str, num_devices: int | None, name: str, topology: dict[str, Any]
) -> None:
    cluster = Cluster.preset(preset)
    found = Target.of(cluster, num_devices)
    assert (found.platform, str(found)) == ("tpu", name)
    assert dict(found.topology) == topology
    assert found.memory_bytes == cluster.device.memory_bytes


def test_devices_of_a_target_are_placed_slice_by_slice() -> None:
    places = Target.of(Cluster.preset("2*v5e:2x4")).places((2, 4, 2))
    assert places is not None
    assert places[:3] == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert [place[0] for place in places] == [0] * 8 + [1] * 8
    assert Target.of(Cluster.preset("8xH100")).places((8,)) is None
