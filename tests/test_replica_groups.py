"""Every spelling of device groups means what a mesh says it means."""

from itertools import combinations
from math import prod

import pytest

from autopar.audit.compiled_collectives import parse_groups
from autopar.sharding.mesh import MeshShape

CUBE = MeshShape(("x", "y", "z"), (2, 3, 4))
SUBSETS = [axes for n in (1, 2, 3) for axes in combinations(CUBE.axis_names, n)]


def as_list(groups: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return sorted(map(list, groups))


@pytest.mark.parametrize("axes", SUBSETS, ids=",".join)
def test_the_three_spellings_agree_with_the_mesh(axes: tuple[str, ...]) -> None:
    groups = CUBE.groups(axes)
    inside = [CUBE.index_of(axis) for axis in axes]
    outside = [index for index in range(3) if index not in inside]
    size = prod(CUBE.axis_sizes[index] for index in inside)
    order = ",".join(map(str, outside + inside))
    quoted = ",".join(f"'{axis}'" for axis in axes)
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)

    spellings = (
        "{" + listed + "}, dimensions={0}",
        f"[{CUBE.size // size},{size}]<=[2,3,4]T({order}), dimensions={{0}}",
        f"mesh['x'=2,'y'=3,'z'=4] {{{quoted}}}, dimensions={{0}}",
    )
    for text in spellings:
        assert sorted(parse_groups(text)) == as_list(groups), text


def test_a_mesh_may_reorder_its_devices() -> None:
    """The first two as jax 0.10.2 prints them for `z` and `x,z` of a 2x2x2 mesh."""
    text = "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}, dimensions={1}"
    assert parse_groups(text) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    text = "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,2,2]T(0,2,1)) {'a'}"
    assert parse_groups(text) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    text = "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}"
    assert parse_groups(text) == [[3, 1], [2, 0]]


def test_a_group_may_run_over_part_of_an_axis() -> None:
    """`'a':(2)4` is the part of size 4 that comes after a major part of size 2."""
    assert parse_groups("mesh['a'=8] {'a':(2)4}") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parse_groups("mesh['a'=8] {'a':(1)2}") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_no_groups_stand_for_all_devices() -> None:
    assert parse_groups("{}, to_apply=%add") == parse_groups("") == []


def test_groups_may_differ_in_size() -> None:
    assert parse_groups("{{0,1,2},{3}}") == [[0, 1, 2], [3]]
