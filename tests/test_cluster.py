"""Presets, cluster files and their errors, and the links that mesh axes get."""

import pickle
import re
import warnings
from pathlib import Path

import jax
import pytest

import autopar.clusters.cluster as clusters
from autopar.clusters.cluster import Cluster, Device, Link
from autopar.costs.collectives import collective_seconds
from autopar.errors import AutoparError, ClusterFileError, FallbackWarning
from autopar.sharding.mesh import MeshShape

KINDS = sorted(path.stem for path in Path(clusters.__file__).parent.glob("*.toml"))

CLUSTER_TEXT = """
name = "mine"
source = "a test"
num_hosts = 2
devices_per_host = 4
launch_seconds = 1e-5
kernel_seconds = 0

[device]
kind = "fast"
memory_bytes = 1000
memory_bandwidth = 1e9
flops_efficiency = 0.5

[device.peak_flops]
float32 = 1e12
bfloat16 = 4e12

[host_link]
name = "wire"
alpha_seconds = 1e-6
bandwidth = 100

[network_link]
name = "string"
alpha_seconds = 2e-6
host_bandwidth = 4
"""


def fake_cluster(within: float = 100.0, between: float = 1.0) -> Cluster:
    """Two hosts of four, bandwidths in bytes/s a device."""
    return Cluster(
        name="2x4 fake",
        num_hosts=2,
        devices_per_host=4,
        device=Device("fake", 10**9, {"float32": 1e12}, 1e9),
        host_link=Link("within", 1e-6, within),
        network_link=Link("between", 5e-6, between),
        launch_seconds=1e-5,
        kernel_seconds=1e-6,
        source="made up",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_preset_loads_and_is_plausible(kind: str) -> None:
    cluster = Cluster.preset(f"2x4x{kind}")
    assert cluster.name == f"2x4x{kind}"
    assert (cluster.num_hosts, cluster.devices_per_host) == (2, 4)
    assert cluster.num_devices == 8
    assert cluster.source
    assert cluster.device.kind == kind
    assert cluster.device.memory_bytes >= 10**9
    assert cluster.device.flops_per_second("bfloat16") >= 1e10
    assert cluster.launch_seconds > 0
    assert cluster.host_link.seconds_per_byte <= cluster.network_link.seconds_per_byte


@pytest.mark.parametrize("kind", KINDS)
def test_small_products_of_accelerators_are_slower(kind: str) -> None:
    device = Cluster.preset(kind).device
    small, large = (device.flops_per_second("float32", 2.0 * n**3) for n in (256, 8192))
    assert kind == "CPU" or small < 0.7 * large
    assert large <= device.flops_per_second("float32")


@pytest.mark.parametrize("kind", KINDS)
def test_every_preset_says_what_of_gradients_is_waited_for(kind: str) -> None:
    path = Path(clusters.__file__).parent / f"{kind}.toml"
    assert "visible_fraction" in path.read_text()
    assert 0 < Cluster.preset(kind).visible_fraction <= 1


def test_the_presets_are_those_promised() -> None:
    assert KINDS == sorted(
        "A100 A100-80GB B200 CPU H100 H200 V100 tpu7x v4 v5e v5p v6e".split()
    )


def test_a_preset_is_hosts_by_devices_by_kind() -> None:
    assert Cluster.preset("8x8xH100").num_devices == 64
    one_host = Cluster.preset("4xh100")
    assert (one_host.num_hosts, one_host.devices_per_host) == (1, 4)
    assert Cluster.preset("v5p").devices_per_host == 4


@pytest.mark.parametrize("name", ["1x72xB200", "1x16xA100", "256xv5e", "64xCPU"])
def test_a_large_host_is_named_in_full_or_of_a_kind_that_has_them(name: str) -> None:
    cluster = Cluster.preset(name)
    assert (cluster.num_hosts, cluster.num_devices) == (1, cluster.devices_per_host)


def test_devices_of_a_host_share_its_network_cards() -> None:
    full, half = Cluster.preset("2x8xH100"), Cluster.preset("2x4xH100")
    assert full.network_link.bandwidth == 50e9
    assert half.network_link.bandwidth == 100e9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("8x8xH10", "but got 'H10'; did you mean H100?"),
        ("8xV6E-big", "describe other devices in a file for Cluster.load"),
        ("8x8", "hosts x devices x kind, such as '8x8xH100', but got '8x8'"),
        ("1x2x3xH100", "hosts x devices x kind"),
        ("64xH100", "a host of H100 has 8; use '8x8xH100' for hosts of 8, or '1x64x"),
        ("20xa100+8xH100", "a host of A100 has 8; use '3x8xA100' for hosts of 8"),
        ("0xH100", "`devices_per_host` must be an integer above zero, but got 0"),
    ],
)
def test_a_bad_preset_name_is_refused_with_a_suggestion(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Cluster.preset(name)


def test_a_file_is_loaded_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(CLUSTER_TEXT)
    cluster = Cluster.load(path)
    assert cluster.num_devices == 8
    assert cluster.network_link == Link("string", 2e-6, 1.0)
    assert cluster.device.flops_per_second("bfloat16") == 2e12
    assert cluster.device.flops_per_second("int32") == 0.5e12
    assert cluster.device.bytes_per_second == 1e9
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(cluster) == hash(Cluster.load(path))


def test_products_take_longer_by_their_area_and_their_depth(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    text = CLUSTER_TEXT.replace(
        "[device.peak", "product_area = 131072\nproduct_depth = 256\n[device.peak", 1
    )
    own = "[device.efficiency]\nbfloat16 = 0.25\n[host_link]"
    path.write_text(text.replace("[host_link]", own))
    device = Cluster.load(path).device
    rate = device.flops_per_second("bfloat16")
    assert (rate, device.flops_per_second("float32")) == (1e12, 0.5e12)
    for batch, m, n, k, times in (
        (2, 256, 256, 512, 2 * 1.5),
        (1, 256, 256, 512, 3 * 1.5),
        (1, 64, 64, 64, 3 * 2),  # as 256 x 256, the least that was measured
        (1, 256, 512, 8192, 1.5 * (1 + 1 / 32)),  # cut in two, side by side
    ):
        alone = 2 * batch * m * n * k / rate
        seconds = device.product_seconds("bfloat16", batch, m, n, k)
        assert seconds == pytest.approx(alone * times)
    assert device.flops_per_second("bfloat16", 2.0 * 512**3) == pytest.approx(
        rate / 1.5 / 1.5
    )


def test_one_host_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    text = CLUSTER_TEXT.replace("num_hosts = 2", "num_hosts = 1")
    path.write_text(text[: text.index("[network_link]")])
    cluster = Cluster.load(path)
    assert cluster.network_link == cluster.host_link


def test_a_field_that_older_files_have_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    for value in ("false", "true"):
        more = f"kernel_seconds = 0\noverlaps = {value}"
        path.write_text(CLUSTER_TEXT.replace("kernel_seconds = 0", more))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Cluster.load(path)
        assert ["overlaps" in str(each.message) for each in told] == [
            True for _ in range(value == "true")
        ]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("num_hosts = 2", "", "field `num_hosts` is missing"),
        ("memory_bytes = 1000", "", "field `device.memory_bytes` is missing"),
        ("[host_link]", "[hostlink]", "`hostlink` is unknown; did you mean host_link?"),
        ("bandwidth = 100", "speed = 100", "field `host_link.speed` is unknown"),
        ("= 1000", "= -1", "`device.memory_bytes` must be an integer above zero, but"),
        ("= 1000", "= 1e3", "`device.memory_bytes` must be an integer above zero, but"),
        ("num_hosts = 2", "num_hosts = true", "`num_hosts` must be an integer"),
        ("= 1e-6", "= -1e-6", "`host_link.alpha_seconds` must be a number of at least"),
        (
            "kernel_seconds = 0",
            "kernel_seconds = 0\nvisible_fraction = 0",
            "`visible_fr",
        ),
        (
            "kernel_seconds = 0",
            "kernel_seconds = 0\nvisible_fraction = 1.5",
            "`visible_fraction` must be a fraction up to 1, but got 1.5",
        ),
        (
            "kernel_seconds = 0",
            "kernel_seconds = 0\nvisable_fraction = 1",
            "field `visable_fraction` is unknown; did you mean visible_fraction?",
        ),
        ("= 1e-5", "= 'soon'", "`launch_seconds` must be a number of at least zero"),
        ("bandwidth = 100", "bandwidth = 0", "`host_link.bandwidth` must be a number"),
        ("bandwidth = 100", "bandwidth = inf", "`host_link.bandwidth` must be a num"),
        ("= 0.5", "= 70", "`device.flops_efficiency` must be a fraction up to 1, but"),
        ("bfloat16 =", "bf16 =", "got 'bf16'; did you mean bfloat16?"),
        ("float32 = 1e12", "", "flop/s for float32 at least"),
        ("float32 = 1e12", "float32 = 0", "`device.peak_flops.float32` must be"),
        ("host_bandwidth = 4", "host_bandwidth = -4", "`network_link.host_bandwidth`"),
        (
            "host_bandwidth = 4",
            "host_bandwidth = 4\nbandwidth = 1",
            "gives both `bandwidth` (a device) and `host_bandwidth`",
        ),
        ('name = "mine"', "name = ", "must be a TOML file"),
        (
            "[host_link]",
            "[device.efficiency]\nint8 = 0.5\n[host_link]",
            "`device.efficiency` has a fraction for 'int8', of which `peak_flops` says",
        ),
        (
            "[host_link]",
            "[device.efficiency]\nfloat32 = [[1e6, 1]]\n[host_link]",
            "`device.efficiency.float32` must be a number above zero, but got [[",
        ),
        (
            "bandwidth = 100",
            "bandwidth = 100\nmeasured = {all_gather = {2 = [[1, 1], [2, 0]]}}",
            "`host_link.measured.all_gather.2` must be two or more pairs [bytes, sec",
        ),
    ],
)
def test_a_bad_file_is_refused_naming_file_and_field(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    path = tmp_path / "my.toml"
    assert old in CLUSTER_TEXT
    path.write_text(CLUSTER_TEXT.replace(old, new, 1))
    with pytest.raises(ClusterFileError) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AutoparError)


def test_a_table_cannot_be_a_number(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    head, _, tail = CLUSTER_TEXT.partition("[host_link]")
    path.write_text("host_link = 3" + head + tail[tail.index("[network") :])
    with pytest.raises(ClusterFileError, match="`host_link` must be a table, but got"):
        Cluster.load(path)


def test_a_missing_file_points_to_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="does not exist; for known devices"):
        Cluster.load(tmp_path / "none.toml")


def test_the_local_cluster_is_the_devices_of_this_process() -> None:
    cluster = Cluster.local()
    assert (cluster.num_hosts, cluster.devices_per_host) == (1, jax.device_count())
    assert cluster.device.kind == "CPU"
    assert cluster.launch_seconds == Cluster.preset("CPU").launch_seconds
    assert cluster.device.memory_bytes > 10**7


@pytest.mark.parametrize(
    ("device_kind", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_a_local_device_is_known_by_its_jax_kind(device_kind: str, kind: str) -> None:
    assert clusters._preset_of(device_kind, "gpu").device.kind == kind


def test_an_unknown_local_device_falls_back_with_a_warning() -> None:
    with pytest.warns(FallbackWarning, match="'GeForce' has no preset, so its speed"):
        assert clusters._preset_of("GeForce", "gpu").device.kind == "A100"


def test_a_cluster_prints_itself_on_one_screen() -> None:
    text = str(Cluster.preset("8x8xH100"))
    assert "8x8xH100: 64 devices, 8 a host" in text
    assert "H100: 80 GB at 3350 GB/s" in text
    assert "EFA or InfiniBand, 3,200 Gbit/s: 50 GB/s a device, 4 us" in text


def test_an_axis_inside_hosts_uses_the_host_link_and_one_across_the_network() -> None:
    mesh = MeshShape(("data", "model"), (2, 4))
    data, model = (fake_cluster().link(mesh, name) for name in (["data"], ["model"]))
    assert (data.size, data.alpha_seconds, data.seconds_per_byte) == (2, 5e-6, 1.0)
    assert (model.size, model.alpha_seconds, model.seconds_per_byte) == (4, 1e-6, 0.01)
    assert data.launch_seconds == model.launch_seconds == 1e-5


@pytest.mark.parametrize(
    ("sizes", "axes", "seconds_per_byte"),
    [
        ((8,), "a", 0.25),  # One ring: all four cards of a host to itself.
        ((4, 2), "a", 0.5),  # Two rings through each host.
        ((2, 4), "a", 1.0),  # Four rings, one a device.
        ((2, 4), "ab", 0.25),  # Both axes at once are one ring again.
        ((2, 2, 2), "ac", 0.5),
        ((2, 2, 2), "bc", 0.01),
        ((2, 2), "ab", 0.01),  # A mesh of four fits in the first host.
        ((2, 3), "a", 0.5),  # 0-3 stays in the first host; 1-4 and 2-5 leave it.
    ],
)
def test_rings_that_leave_a_host_share_its_cards(
    sizes: tuple[int, ...], axes: str, seconds_per_byte: float
) -> None:
    mesh = MeshShape(tuple("abc"[: len(sizes)]), sizes)
    link = fake_cluster().link(mesh, axes)
    assert link.seconds_per_byte == pytest.approx(seconds_per_byte)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [((8,), "a"), ((4, 2), "a"), ((2, 4), "a"), ((2, 4), "ab"), ((2, 2, 2), "ac")],
)
def test_an_all_to_all_between_hosts_takes_what_leaves_the_fuller_host(
    sizes: tuple[int, ...], axes: str
) -> None:
    """Pair by pair: each device sends every other one an equal part of its bytes."""
    mesh = MeshShape(tuple("abc"[: len(sizes)]), sizes)
    sent_out = {0: 0.0, 1: 0.0}
    for group in mesh.groups(axes):
        for here in group:
            for there in group:
                if here // 4 != there // 4:
                    sent_out[here // 4] += 1 / (len(group) - 1)
    link = fake_cluster().link(mesh, axes)
    seconds = max(sent_out.values()) / 4  # a host's cards send 4 bytes/s
    assert link.seconds_per_sent_byte("all_to_all") == pytest.approx(seconds)
    assert seconds >= link.seconds_per_byte == link.seconds_per_sent_byte("all_gather")


def test_gathers_between_hosts_pay_each_device_on_their_ring() -> None:
    cluster = fake_cluster()
    whole = cluster.link(MeshShape(("a",), (8,)), "a")
    assert whole.ring_seconds == pytest.approx(1 * 5e-6 + 6 * 1e-6)
    seconds = {
        kind: collective_seconds(kind, 0.0, whole) - whole.launch_seconds
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert seconds["all_gather"] == seconds["reduce_scatter"]
    assert list(seconds.values()) == pytest.approx([11e-6, 11e-6, 6 * 5e-6])
    assert cluster.link(MeshShape(("a",), (4,)), "a").ring_seconds is None


def test_an_all_to_all_is_never_faster_than_the_host_link() -> None:
    cluster = fake_cluster(within=0.1, between=100.0)
    link = cluster.link(MeshShape(("a",), (8,)), ("a",))
    # Three of the seven others are on the same host.
    assert link.seconds_per_sent_byte("all_to_all") == pytest.approx(10 * 3 / 7)


def test_a_ring_over_hosts_is_never_faster_than_the_host_link() -> None:
    cluster = fake_cluster(within=2.0, between=1.0)
    link = cluster.link(MeshShape(("a",), (8,)), ("a",))
    assert link.seconds_per_byte == 0.5


def test_equal_links_give_equal_axes() -> None:
    cluster = fake_cluster(within=1.0, between=1.0)
    mesh = MeshShape(("data", "model"), (2, 4))
    data, model = (cluster.link(mesh, name) for name in (["data"], ["model"]))
    assert data.seconds_per_byte == model.seconds_per_byte


def test_a_mesh_must_fit_its_cluster() -> None:
    with pytest.raises(ValueError, match="needs 16 and 2x4 fake has 8; use smaller"):
        fake_cluster().link(MeshShape(("a",), (16,)), "a")
