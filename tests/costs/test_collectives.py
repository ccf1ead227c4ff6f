"""Collective costs: ring bytes, launch, slowest link, and affinity in the bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.clusters.cluster import AxisLink, Cluster
from autopar.costs.collectives import (
    SIZES,
    at_size,
    collective_seconds,
    num_steps,
    wire_bytes,
)
from autopar.sharding.collective import COLLECTIVE_KINDS, CollectiveKind
from autopar.sharding.mesh import MeshShape

FAST = AxisLink(4, alpha_seconds=1e-6, seconds_per_byte=1e-9, launch_seconds=1e-5)
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
    seconds = collective_seconds("all_reduce", 4000, FAST)
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


def test_an_all_to_all_has_a_speed_of_its_own() -> None:
    link = AxisLink(4, 0.0, 1e-9, exchange_seconds_per_byte=3e-9)
    plain = AxisLink(4, 0.0, 1e-9)
    for kind in COLLECTIVE_KINDS:
        times = 3 if kind == "all_to_all" else 1
        expected = times * collective_seconds(kind, 1e6, plain)
        assert collective_seconds(kind, 1e6, link) == pytest.approx(expected)


def test_a_group_of_one_device_is_free() -> None:
    for kind in COLLECTIVE_KINDS:
        assert collective_seconds(kind, 1e6, ALONE) == 0.0


@given(kinds, links, st.floats(0, 1e12))
def test_what_is_affine_in_the_bytes_is_so_between_tabulated_sizes(
    kind: CollectiveKind, link: AxisLink, result_bytes: float
) -> None:
    by_size = collective_seconds(kind, SIZES, link)
    seconds = collective_seconds(kind, result_bytes, link)
    assert at_size(by_size, result_bytes) == pytest.approx(seconds, rel=1e-9)


MEASURED = {
    "all_gather": {2: [(1e5, 1e-5), (1e6, 2e-5)], 8: [(1e5, 3e-5), (1e6, 4e-5)]},
    "reduce_scatter": {2: [(1e5, 1e-5), (1e6, 2e-5)]},
}


@pytest.mark.parametrize(
    ("kind", "size", "result_bytes", "seconds"),
    [
        ("all_gather", 2, 1e6, 2e-5),
        ("all_gather", 2, 1e3, 1e-5),  # a launch
        ("all_gather", 2, 2.8e6, 4e-5),  # as the last two sizes go on
        ("all_gather", 4, 1e6, 3e-5),  # half way, in steps of doubling
        ("all_gather", 64, 1e6, 4e-5 * (63 / 64) / (7 / 8) + 3e-6),
        ("reduce_scatter", 2, 5e5, 2e-5),  # each device has half of the whole
        ("all_reduce", 2, 1e6, 2e-6 + 1e6 * 1e-9),  # was not measured
    ],
)
def test_a_measured_link_takes_what_was_measured(
    kind: CollectiveKind, size: int, result_bytes: float, seconds: float
) -> None:
    link = AxisLink(size, 1e-6, 1e-9, measured=MEASURED)
    assert collective_seconds(kind, result_bytes, link) == pytest.approx(seconds)


@given(kinds, links.filter(lambda link: link.size > 1), st.integers(1, 10**9))
def test_one_collective_is_better_than_two_of_half_the_bytes(
    kind: CollectiveKind, link: AxisLink, result_bytes: int
) -> None:
    whole = collective_seconds(kind, 2 * result_bytes, link)
    assert whole < 2 * collective_seconds(kind, result_bytes, link)


@given(kinds, st.sampled_from((2, 3, 4, 8)), st.integers(1, 10**10))
def test_on_nvlink_more_bytes_take_longer_and_one_collective_less_than_two(
    kind: CollectiveKind, size: int, result_bytes: int
) -> None:
    link = Cluster.preset("8xH100").link(MeshShape(("x",), (size,)), ("x",))
    half, whole = collective_seconds(kind, np.array([1, 2]) * result_bytes, link)
    assert 14e-6 < half <= whole < 2 * half


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of all_reduce, .* got 'psum'"):
        wire_bytes("psum", 1, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a group of 1 device or more, but got 0"):
        wire_bytes("all_reduce", 1, 0)
