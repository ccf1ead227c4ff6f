"""Reading meshes in every form, and replica groups against jax's device layout."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autopar.audit.compiled_collectives import collectives_in_lowered
from autopar.sharding.mesh import MeshLike, MeshShape, parse_mesh

DATA_MODEL = MeshShape(("data", "model"), (2, 4))


@pytest.mark.parametrize(
    "value",
    [
        "data:2;model:4",
        "data:2,model:4",
        "data:2.model:4",
        "data:2 model:4",
        " data : 2 ; model : 4 ",
        {"data": 2, "model": 4},
        [("data", 2), ("model", 4)],
        (("data", np.int64(2)), ["model", 4]),
        "data:-1;model:4",
        {"data": 2, "model": -1},
        AbstractMesh((2, 4), ("data", "model")),
        DATA_MODEL,
    ],
    ids=str,
)
def test_every_form_of_a_mesh_reads_the_same(value: MeshLike) -> None:
    assert parse_mesh(value, num_devices=8) == DATA_MODEL


def test_a_jax_mesh_is_read_and_may_use_fewer_devices(mesh_2d: Mesh) -> None:
    assert parse_mesh(mesh_2d, 8) == MeshShape(("x", "y"), (2, 4))
    part = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert parse_mesh(part, 8) == MeshShape(("data",), (2,))


@pytest.mark.parametrize(
    ("value", "text"),
    [(8, "x:8"), ((2, 4), "x:2;y:4"), ([2, 2, -1], "x:2;y:2;z:2"), (-1, "x:8")],
)
def test_sizes_alone_are_called_x_y_z(value: MeshLike, text: str) -> None:
    assert str(parse_mesh(value, 8)) == text


def test_a_mesh_prints_as_what_it_is_read_from() -> None:
    assert str(DATA_MODEL) == "data:2;model:4"
    assert parse_mesh(str(DATA_MODEL)) == DATA_MODEL
    assert DATA_MODEL.size == 8
    assert DATA_MODEL.num_axes == 2
    assert DATA_MODEL.index_of("model") == 1
    assert DATA_MODEL.size_of("model") == 4


@pytest.mark.parametrize(
    ("value", "num_devices", "error", "text"),
    [
        ("", 8, ValueError, "at least one axis, but got none; for a single device"),
        ({}, 8, ValueError, "at least one axis"),
        ((), 8, ValueError, "at least one axis"),
        ("data:2;data:4", 8, ValueError, "'data' occurs 2 times in ('data', 'data')"),
        ("data:0", 8, ValueError, "size 1 or more, but 'data' has 0"),
        ({"data": -2}, 8, ValueError, "size 1 or more, but 'data' has -2"),
        ([("", 8)], 8, ValueError, "non-empty string, but got ''"),
        ("data:2;model:8", 8, ValueError, "needs 16 and there are 8; use smaller axes"),
        ("data:2;model:2", 8, ValueError, "holds 4 of 8; use -1 for one axis"),
        ("data:3;model:-1", 8, ValueError, "must divide the 8 devices, but their"),
        ("data:0;model:-1", 8, ValueError, "but their product is 0"),
        ("data:-1;model:-1", 8, ValueError, "at most one mesh axis can be filled"),
        ("data:-1", None, ValueError, "that is not known here; write the size"),
        ("data=8", 8, ValueError, "'data=8' has the part 'data=8'"),
        ("data:x", 8, ValueError, "name:size pairs such as 'data:2;model:4'"),
        ((1, 2, 2, 2), 8, ValueError, "at most 3 mesh axes can go without names"),
        ({"data": 2.0}, 8, TypeError, "must be an integer, but axis 'data' has 2.0"),
        (None, 8, TypeError, "but got None of type NoneType"),
        (True, 8, TypeError, "but got True of type bool"),
    ],
    ids=str,
)
def test_a_bad_mesh_is_refused_with_rule_value_and_remedy(
    value: Any, num_devices: int | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        parse_mesh(value, num_devices)


def test_sizes_and_names_go_together() -> None:
    with pytest.raises(ValueError, match="one size for each axis name"):
        MeshShape(("data",), (2, 4))


def test_an_unknown_axis_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="one of data, model, but got 'modle'"):
        DATA_MODEL.index_of("modle")
    with pytest.raises(ValueError, match="each mesh axis at most once"):
        DATA_MODEL.groups(("data", "data"))


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ((), tuple((i,) for i in range(8))),
        (("model",), ((0, 1, 2, 3), (4, 5, 6, 7))),
        (("data",), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (("model", "data"), (tuple(range(8)),)),
    ],
)
def test_groups_of_two_by_four(
    axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    assert DATA_MODEL.groups(axes) == groups


@st.composite
def meshes_of_eight_and_axes(draw: st.DrawFn) -> tuple[MeshShape, list[str]]:
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]))
    names = tuple("abc"[: len(sizes)])
    axes = draw(st.lists(st.sampled_from(names), unique=True))
    return MeshShape(names, sizes), axes


@given(meshes_of_eight_and_axes())
def test_groups_are_the_devices_that_share_the_other_axes_of_a_jax_mesh(
    drawn: tuple[MeshShape, list[str]],
) -> None:
    mesh, axes = drawn
    jax_mesh = Mesh(np.array(jax.devices()).reshape(mesh.axis_sizes), mesh.axis_names)
    assert mesh.device_ids().tolist() == jax_mesh.device_ids.tolist()
    members: dict[tuple[int, ...], list[int]] = {}
    for place in np.ndindex(mesh.axis_sizes):
        others = tuple(
            i
            for name, i in zip(mesh.axis_names, place, strict=True)
            if name not in axes
        )
        members.setdefault(others, []).append(int(jax_mesh.device_ids[place]))
    assert mesh.groups(axes) == tuple(map(tuple, members.values()))


def test_groups_are_those_that_jax_lowers(mesh_2d: Mesh) -> None:
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x")

    program = jax.jit(
        jax.shard_map(
            total,
            mesh=mesh_2d,
            in_specs=PartitionSpec("x", "y"),
            out_specs=PartitionSpec(None, "y"),
        )
    )
    lowered = program.lower(np.ones((2, 4), np.float32))
    (found,) = collectives_in_lowered(lowered)
    assert found.groups == parse_mesh(mesh_2d).groups(("x",))
