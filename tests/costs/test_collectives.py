"""Collective costs: ring bytes, launch, slowest link, and affinity in the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.clusters.cluster import AxisLink, Cluster
from autopar.costs.collectives import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    affine,
    collective_seconds,
    num_steps,
    wire_bytes,
)
from autopar.sharding.mesh import MeshShape

FAST = AxisLink(4, alpha_seconds=1e-6, seconds_per_byte=1e-9, launch_seconds=1e-5)
SLOW = AxisLink(2, alpha_seconds=5e-6, seconds_per_byte=1e-8, launch_seconds=1e-5)
ALONE = AxisLink(1, alpha_seconds=9e-6, seconds_per_byte=9e-8, launch_seconds=1e-5)

links = st.builds(
    AxisLink,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.floats(0, 1e-5),
    st.floats(1e-12, 1e-8),
    st.floats(1e-6, 1e-5),
)
kinds = st.sampled_from(COLLECTIVE_KINDS)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("all_reduce", 1500),
        ("all_gather", 750),
        ("reduce_scatter", 3000),
        ("all_to_all", 750),
        ("collective_permute", 1000),
    ],
)
def test_wire_bytes_of_a_ring_of_four(kind: CollectiveKind, wire: float) -> None:
    assert wire_bytes(kind, 1000, 4) == wire
    assert wire_bytes(kind, 1000, 1) == 0


@given(st.integers(2, 64), st.integers(1, 10**9))
def test_a_reduce_scatter_and_an_all_gather_make_an_all_reduce(
    group_size: int, shard_bytes: int
) -> None:
    whole_bytes = shard_bytes * group_size
    both = wire_bytes("reduce_scatter", shard_bytes, group_size) + wire_bytes(
        "all_gather", whole_bytes, group_size
    )
    assert both == pytest.approx(wire_bytes("all_reduce", whole_bytes, group_size))


def test_data_and_tensor_parallel_rings_of_the_two_layer_network() -> None:
    # acceptance.md 3.1, F1 over 2 x 4: batch over rows, hidden over columns.
    weights = wire_bytes("all_reduce", 131_072, 2)
    activations = wire_bytes("all_reduce", 16_384, 4)
    assert weights + activations == 155_648


def test_seconds_are_launch_latency_and_wire() -> None:
    seconds = collective_seconds("all_reduce", 4000, [FAST])
    assert seconds == pytest.approx(1e-5 + 4 * 1e-6 + 6000 * 1e-9)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("all_reduce", 6),
        ("all_gather", 3),
        ("reduce_scatter", 3),
        ("all_to_all", 7),
        ("collective_permute", 1),
    ],
)
def test_steps_in_a_group_of_eight(kind: CollectiveKind, steps: int) -> None:
    assert num_steps(kind, 8) == steps
    assert num_steps(kind, 1) == 0


def test_several_axes_are_one_group_at_the_slowest_links_speed() -> None:
    joint = AxisLink(8, 5e-6, 1e-8, 1e-5)
    for kind in COLLECTIVE_KINDS:
        assert affine(kind, [FAST, SLOW]) == affine(kind, [joint])


def test_an_all_to_all_has_a_speed_of_its_own() -> None:
    link = AxisLink(4, 0.0, 1e-9, exchange_seconds_per_byte=3e-9)
    plain = AxisLink(4, 0.0, 1e-9)
    for kind in COLLECTIVE_KINDS:
        times = 3 if kind == "all_to_all" else 1
        expected = times * affine(kind, [plain])[1]
        assert affine(kind, [link])[1] == pytest.approx(expected)


def test_an_axis_of_one_device_is_free_and_does_not_slow_others() -> None:
    for kind in COLLECTIVE_KINDS:
        assert affine(kind, [ALONE]) == (0.0, 0.0)
        assert affine(kind, []) == (0.0, 0.0)
        assert affine(kind, [FAST, ALONE]) == affine(kind, [FAST])


@given(kinds, st.lists(links, max_size=3), st.integers(0, 10**9))
def test_cost_is_affine_in_the_result_bytes(
    kind: CollectiveKind, axis_links: list[AxisLink], result_bytes: int
) -> None:
    alpha_seconds, seconds_per_byte = affine(kind, axis_links)
    seconds = collective_seconds(kind, result_bytes, axis_links)
    assert seconds == alpha_seconds + seconds_per_byte * result_bytes
    assert min(alpha_seconds, seconds_per_byte) >= 0


@given(kinds, links.filter(lambda link: link.size > 1), st.integers(1, 10**9))
def test_one_collective_is_better_than_two_of_half_the_bytes(
    kind: CollectiveKind, link: AxisLink, result_bytes: int
) -> None:
    whole = collective_seconds(kind, 2 * result_bytes, [link])
    assert whole < 2 * collective_seconds(kind, result_bytes, [link])


def test_a_clusters_joint_link_is_never_slower_than_its_axes_together() -> None:
    cluster = Cluster.preset("4x8xH100")
    mesh = MeshShape(("data", "model"), (4, 8))
    joint = cluster.link(mesh, mesh.axis_names)
    for kind in COLLECTIVE_KINDS:
        together = collective_seconds(kind, 10**6, cluster.axis_links(mesh))
        assert collective_seconds(kind, 10**6, [joint]) <= together


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of all_reduce, .* got 'psum'"):
        wire_bytes("psum", 1, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a group of 1 device or more, but got 0"):
        wire_bytes("all_reduce", 1, 0)
