"""An audit passes what was planned and fails every single change of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from autopar.audit.audit import Audit, audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.errors import AuditError, AutoparError
from autopar.lowering.memory_use import MemoryUse
from autopar.sharding.collective import Collective
from autopar.sharding.mesh import MeshShape

GRID = MeshShape(("data", "model"), (2, 4))
DATA = GRID.groups(["data"])
MODEL = GRID.groups(["model"])
RING = tuple((row[i], row[(i + 1) % 4]) for row in MODEL for i in range(4))
DATA_RING = tuple((pair[i], pair[1 - i]) for pair in DATA for i in range(2))


def all_reduce(num_bytes: int = 256, count: int = 1, **fields: Any) -> Collective:
    given: dict[str, Any] = {"groups": MODEL, "dtype": "float32", "reduction": "sum"}
    return Collective("all_reduce", bytes=num_bytes, count=count, **(given | fields))


PLAN = (
    all_reduce(count=3, source="mlp/w1"),
    all_reduce(reduction="max", source="softmax"),
    Collective("all_gather", MODEL, "float32", 1024),
    Collective("reduce_scatter", DATA, "float32", 128, reduction="sum"),
    Collective("all_to_all", MODEL, "float32", 256),
    Collective("collective_permute", RING, "float32", 256),
)


def step(x: jax.Array) -> list[jax.Array]:
    looped, _ = lax.scan(
        lambda c, _: (lax.psum(c, "model") * 0.5, None), x, None, length=3
    )
    return [
        looped,
        lax.pmax(x, "model"),
        lax.all_gather(x + 1, "model", tiled=True),
        lax.psum_scatter(x + 2, "data", tiled=True),
        lax.all_to_all(x + 3, "model", 0, 0, tiled=True),
        lax.ppermute(x + 4, "model", [(i, (i + 1) % 4) for i in range(4)]),
    ]


def lower(fun: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(GRID.axis_sizes, GRID.axis_names, axis_types=types)
    replicated = PartitionSpec()
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    return jax.jit(mapped).lower(*args)


def audit_of(
    planned: tuple[Collective, ...], fun: Callable[..., Any], *args: Any
) -> Audit:
    lowered = lower(fun, *args)
    compiled = lowered.compile()
    text = compiled.as_text()
    assert text is not None
    return audit(
        planned,
        collectives_in_lowered(lowered),
        collectives_in_compiled(text),
        memory=MemoryUse.of(compiled),
        num_devices=8,
        mesh=GRID,
    )


def audit_compiled(
    planned: tuple[Collective, ...], compiled: tuple[Collective, ...]
) -> Audit:
    """An audit in which the lowered program is as planned."""
    return audit(planned, planned, compiled, num_devices=8, mesh=GRID)


@pytest.fixture(scope="module")
def programs() -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    lowered = lower(step, jnp.zeros(64))
    text = lowered.compile().as_text()
    assert text is not None
    return collectives_in_lowered(lowered), collectives_in_compiled(text)


def test_a_program_as_planned_passes_with_equal_bytes() -> None:
    found = audit_of(PLAN, step, jnp.zeros(64))
    found.raise_if_wrong()
    assert found.ok and not found.differences
    for row in found.rows:
        assert row.planned_bytes == row.lowered_bytes == row.compiled_bytes
    by_name = {(row.collective, row.axes): row.planned_bytes for row in found.rows}
    assert by_name == {
        ("all_gather", "model"): 1024,
        ("all_reduce(max)", "model"): 256,
        ("all_reduce(sum)", "model"): 768,
        ("all_to_all", "model"): 256,
        ("collective_permute", "model"): 256,
        ("reduce_scatter(sum)", "data"): 128,
    }


def other_kind(planned: Collective) -> Collective:
    if planned.kind == "collective_permute":
        return replace(planned, kind="all_to_all", groups=MODEL)
    kinds = {
        "all_reduce": "reduce_scatter",
        "reduce_scatter": "all_reduce",
        "all_gather": "all_to_all",
        "all_to_all": "all_gather",
    }
    return replace(planned, kind=kinds[planned.kind])


def other_axis(planned: Collective) -> Collective:
    other = {MODEL: DATA, DATA: MODEL, RING: DATA_RING, DATA_RING: RING}
    by_order = {tuple(sorted(groups)): found for groups, found in other.items()}
    return replace(planned, groups=by_order[planned.groups])


def both_axes(planned: Collective) -> Collective:
    (everyone,) = GRID.groups(["data", "model"])
    if planned.kind != "collective_permute":
        return replace(planned, groups=(everyone,))
    ring = tuple((device, (device + 1) % 8) for device in everyone)
    return replace(planned, groups=ring)


MUTATIONS: dict[str, Callable[[Collective], Collective]] = {
    "kind": other_kind,
    "axis": other_axis,
    "both axes": both_axes,
    "bytes": lambda c: replace(c, bytes=2 * c.bytes),
    "fewer bytes": lambda c: replace(c, bytes=c.bytes // 2),
    "count": lambda c: replace(c, count=c.count + 1),
    "type": lambda c: replace(c, dtype="int32"),
    "reduction": lambda c: replace(c, reduction="min"),
}


@pytest.mark.parametrize("index", range(len(PLAN)), ids=lambda i: PLAN[i].name)
@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_any_change_of_one_planned_collective_fails(
    programs: tuple[tuple[Collective, ...], tuple[Collective, ...]],
    index: int,
    change: Callable[[Collective], Collective],
) -> None:
    planned = [*PLAN]
    planned[index] = change(PLAN[index])
    found = audit(planned, *programs, num_devices=8, mesh=GRID)
    assert not found.ok
    with pytest.raises(AuditError, match="planned .*, but the lowered program has"):
        found.raise_if_wrong()


@pytest.mark.parametrize("index", range(len(PLAN)), ids=lambda i: PLAN[i].name)
def test_a_collective_too_many_or_too_few_fails(
    programs: tuple[tuple[Collective, ...], tuple[Collective, ...]], index: int
) -> None:
    fewer = PLAN[:index] + PLAN[index + 1 :]
    for planned in (fewer, (*PLAN, PLAN[index])):
        assert not audit(planned, *programs, num_devices=8).ok


@pytest.mark.parametrize(
    "change", [MUTATIONS[name] for name in ("kind", "axis", "bytes", "count")]
)
@pytest.mark.parametrize("index", range(len(PLAN)), ids=lambda i: PLAN[i].name)
def test_a_compiled_program_may_not_do_what_is_not_planned(
    index: int, change: Callable[[Collective], Collective]
) -> None:
    compiled = (*PLAN[:index], change(PLAN[index]), *PLAN[index + 1 :])
    found = audit_compiled(PLAN, compiled)
    assert not found.ok
    with pytest.raises(AuditError, match="but the compiled program has"):
        found.raise_if_wrong()


def test_the_error_names_the_collective_and_both_values() -> None:
    found = audit((all_reduce(),), (all_reduce(512),), None, num_devices=8, mesh=GRID)
    with pytest.raises(AssertionError) as caught:
        found.raise_if_wrong()
    assert isinstance(caught.value, AutoparError)
    assert (
        "all_reduce(sum) over model: planned 1 x 256 B float32, but the lowered "
        "program has 1 x 512 B float32"
    ) in str(caught.value)


@pytest.mark.parametrize(
    "compiled",
    [
        all_reduce(32),
        all_reduce(400),
        all_reduce(256, dtype="int32"),
        all_reduce(128, dtype="bfloat16"),
    ],
)
def test_what_no_rewrite_explains_is_wrong(compiled: Collective) -> None:
    """Pieces of another type, also a narrower sum; smaller ones, or more bytes."""
    planned = all_reduce(256), all_reduce(64)
    found = audit(planned, planned, (compiled,), num_devices=8, mesh=GRID)
    assert not found.ok


@pytest.mark.parametrize(
    ("planned", "compiled", "rewrite"),
    [
        ((all_reduce(count=2),), (all_reduce(), all_reduce()), ""),
        (
            (all_reduce(256), all_reduce(64)),
            (all_reduce(320),),
            "combine: same bytes in 1 pieces, not 2",
        ),
        (
            (all_reduce(256), all_reduce(64), all_reduce(64)),
            (all_reduce(320),),
            "combine: fewer bytes in 1 pieces, not 3",
        ),
        (
            (all_reduce(), all_reduce()),
            (all_reduce(),),
            "dedup: 1 of 2 x 256 B float32 gone",
        ),
        (
            (all_reduce(count=4),),
            (all_reduce(),),
            "hoist: 3 of 4 x 256 B float32 gone",
        ),
        ((all_reduce(),), (), "constant or dead: 1 of 1 x 256 B float32 gone"),
        (
            (Collective("all_gather", MODEL, "float32", 256),),
            (Collective("all_gather", MODEL, "bool", 64),),
            "narrow: 1 x 256 B float32 sent as bool",
        ),
        (
            (all_reduce(128, dtype="bfloat16"), all_reduce(256)),
            (all_reduce(256), all_reduce(256)),
            "widen: 1 x 128 B bfloat16 sent as float32",
        ),
    ],
)
def test_a_rewrite_that_adds_no_bytes_is_named(
    planned: tuple[Collective, ...], compiled: tuple[Collective, ...], rewrite: str
) -> None:
    found = audit_compiled(planned, compiled)
    found.raise_if_wrong()
    assert [each.reason for each in found.differences] == ([rewrite] if rewrite else [])


@pytest.mark.parametrize(
    ("planned", "compiled"),
    [
        # Widening explains twice the bytes, not thrice, and no other type.
        ((all_reduce(128, dtype="bfloat16"),), (all_reduce(384),)),
        ((all_reduce(128, dtype="bfloat16"),), (all_reduce(256, dtype="int32"),)),
        ((all_reduce(),), (all_reduce(512, dtype="float64"), all_reduce(4))),
        # Nobody knows how often it runs.
        ((all_reduce(count=3),), (all_reduce(unbounded=True),)),
    ],
)
def test_a_difference_that_no_rewrite_explains_fails(
    planned: tuple[Collective, ...], compiled: tuple[Collective, ...]
) -> None:
    assert not audit_compiled(planned, compiled).ok


def test_real_programs_are_rewritten_as_named() -> None:
    def duplicated(x: jax.Array) -> list[jax.Array]:
        return [lax.psum(x, "model"), lax.psum(x, "model") * 2]

    def narrow(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "model", tiled=True)

    def hoisted(x: jax.Array) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            return total + lax.all_gather(x, "model", tiled=True).sum(), None

        return lax.scan(body, jnp.zeros(()), None, length=5)[0]

    gather = Collective("all_gather", MODEL, "float32", 1024)
    for fun, dtype, planned, rewrite in (
        (duplicated, "float32", (all_reduce(count=2),), "dedup"),
        (hoisted, "float32", (replace(gather, count=5),), "hoist"),
        (
            narrow,
            "bfloat16",
            (replace(gather, dtype="bfloat16", bytes=512),),
            "widen",
        ),
    ):
        found = audit_of(planned, fun, jnp.zeros(64, dtype))
        found.raise_if_wrong()
        (difference,) = found.differences
        assert difference.level == "compiled"
        assert difference.reason.startswith(f"{rewrite}: ")


def test_collectives_that_move_nothing_are_ignored() -> None:
    alone = tuple((device,) for device in range(8))
    itself = tuple((device, device) for device in range(8))
    trivial = (
        all_reduce(groups=alone),
        all_reduce(0),
        Collective("collective_permute", itself, "float32", 4),
        Collective("collective_permute", (), "float32", 4),
    )
    found = audit((), trivial, trivial, num_devices=8)
    assert found.ok and not found.rows


def test_without_a_compiled_program_only_the_lowered_is_checked() -> None:
    found = audit(PLAN, PLAN, None, num_devices=8)
    assert found.ok
    assert {row.compiled_bytes for row in found.rows} == {None}


def test_memory_is_arguments_results_and_temporaries_less_donated() -> None:
    compiled = jax.jit(lambda x: x @ x.T, donate_argnums=0).lower(jnp.zeros((64, 64)))
    used = MemoryUse.of(compiled.compile())
    assert (used.argument_bytes, used.output_bytes) == (16384, 16384)
    assert used.device_bytes == 32768 + used.temp_bytes - used.alias_bytes
    assert MemoryUse(100, 50, 30, 20).device_bytes == 160


def test_groups_print_as_axes_in_the_fewest_words() -> None:
    mesh = MeshShape(("one", "data", "model"), (1, 2, 4))
    everyone = mesh.groups(["data", "model"])
    odd = ((0, 5), (1, 4), (2, 7), (3, 6))
    swapped = ((0, 4, 1, 5, 2, 6, 3, 7),)
    planned = (
        *(all_reduce(groups=groups) for groups in (DATA, everyone, odd)),
        Collective("collective_permute", DATA_RING, "float32", 4),
        Collective("all_gather", swapped, "float32", 4),
    )
    rows = audit(planned, planned, None, num_devices=8, mesh=mesh).rows
    assert sorted(row.axes for row in rows) == [
        "data",
        "data",
        "data,model",
        "model,data",
        "{{0,5},{1,4},{2,7},{3,6}}",
    ]
    rows = audit(planned[:2], planned[:2], None, num_devices=8).rows
    assert [row.axes for row in rows] == ["all 8", "{{0,4},{1,5},{2,6},{3,7}}"]


def test_it_prints_as_one_table() -> None:
    found = audit(
        PLAN,
        PLAN[:1],
        None,
        memory=MemoryUse(1000, 500, 300, 200),
        predicted_bytes=2000,
        num_devices=8,
        mesh=GRID,
    )
    text = str(found)
    assert "all_reduce(sum)" in text and "768" in text and "softmax" in text
    assert "memory: 1,600 B a device" in text
    assert "0.80 of the 2,000 B predicted" in text
    assert text.endswith("audit: 5 wrong")


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="within the 4 devices"):
        audit(PLAN, PLAN, None, num_devices=4)
    with pytest.raises(ValueError, match="must have 8 devices, but got"):
        audit((), (), None, num_devices=8, mesh=MeshShape(("x",), (4,)))
