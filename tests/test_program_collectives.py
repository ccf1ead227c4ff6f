"""What the readers find in real programs is what the programs were written with."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.audit.loop_trips import num_trips
from autopar.audit.rewrites import executions
from autopar.sharding.collective import Collective
from autopar.sharding.mesh import MeshShape

MESHES = {
    "8": MeshShape(("x",), (8,)),
    "2x4": MeshShape(("x", "y"), (2, 4)),
    "2x2x2": MeshShape(("x", "y", "z"), (2, 2, 2)),
}
GRID = MESHES["2x4"]
X = GRID.groups(["x"])
Y = GRID.groups(["y"])
ALL = GRID.groups(["x", "y"])
VECTOR = jnp.zeros(64)  # 256 bytes on every device: nothing is split on the way in


def lower(shape: MeshShape, fun: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    types = (AxisType.Auto,) * shape.num_axes
    mesh = jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types)
    replicated = PartitionSpec()
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    return jax.jit(mapped).lower(*args)


def lowered_on_grid(fun: Callable[..., Any], *args: Any) -> tuple[Collective, ...]:
    return collectives_in_lowered(lower(GRID, fun, *(args or (VECTOR,))))


def compiled_on_grid(fun: Callable[..., Any], *args: Any) -> tuple[Collective, ...]:
    text = lower(GRID, fun, *(args or (VECTOR,))).compile().as_text()
    assert text is not None
    return collectives_in_compiled(text)


def in_any_order(collectives: tuple[Collective, ...]) -> list[tuple[Any, ...]]:
    """Everything but the count of operations, which a compiler may merge."""
    keys = {(each.kind, each.reduction, each.groups) for each in collectives}
    return sorted(
        (
            *key,
            sorted(
                executions(each for each in collectives if is_of(each, key)).items()
            ),
        )
        for key in keys
    )


def is_of(each: Collective, key: tuple[Any, ...]) -> bool:
    return (each.kind, each.reduction, each.groups) == key


def subsets(shape: MeshShape) -> Iterator[tuple[str, ...]]:
    for num_axes in range(1, shape.num_axes + 1):
        yield from combinations(shape.axis_names, num_axes)


def ring(size: int) -> list[tuple[int, int]]:
    return [(source, (source + 1) % size) for source in range(size)]


def every_kind(
    shape: MeshShape, axes: tuple[str, ...], x: jax.Array
) -> list[jax.Array]:
    size = len(shape.groups(axes)[0])
    return [
        lax.psum(x, axes),
        lax.pmax(x + 1, axes),
        lax.pmin(x + 2, axes),
        lax.all_gather(x + 3, axes, tiled=True),
        lax.psum_scatter(x + 4, axes, tiled=True),
        lax.all_to_all(x + 5, axes, 0, 0, tiled=True),
        lax.ppermute(x + 6, axes, ring(size)),
    ]


def every_collective(shape: MeshShape, axes: tuple[str, ...]) -> list[Collective]:
    groups = shape.groups(axes)
    size = len(groups[0])
    pairs = tuple((group[s], group[t]) for group in groups for s, t in ring(size))
    return [
        Collective("all_reduce", groups, "float32", 256, reduction="sum"),
        Collective("all_reduce", groups, "float32", 256, reduction="max"),
        Collective("all_reduce", groups, "float32", 256, reduction="min"),
        Collective("all_gather", groups, "float32", 256 * size),
        Collective("reduce_scatter", groups, "float32", 256 // size, reduction="sum"),
        Collective("all_to_all", groups, "float32", 256),
        Collective("collective_permute", pairs, "float32", 256),
    ]


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_every_kind_is_read_over_every_axis_subset(shape: MeshShape) -> None:
    def step(x: jax.Array) -> list[jax.Array]:
        shifted = (x * (1.5 + i) for i, _ in enumerate(subsets(shape)))
        return [
            y
            for axes, z in zip(subsets(shape), shifted, strict=True)
            for y in every_kind(shape, axes, z)
        ]

    planned = [c for axes in subsets(shape) for c in every_collective(shape, axes)]
    lowered = lower(shape, step, VECTOR)
    text = lowered.compile().as_text()
    assert text is not None
    assert collectives_in_lowered(lowered) == tuple(planned)
    assert in_any_order(collectives_in_compiled(text)) == in_any_order(tuple(planned))


def scanned(body: Callable[[Any], Any], length: int) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=length)[0]


def test_a_loop_multiplies_by_its_trip_count_and_nested_loops_by_both() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return lax.psum(x, "x") * 0.5

    def outer(x: jax.Array) -> jax.Array:
        return scanned(inner, 3)(x) + lax.pmax(x, "y")

    expected = (
        Collective("all_reduce", X, "float32", 256, 15, "sum"),
        Collective("all_reduce", Y, "float32", 256, 5, "max"),
    )
    assert lowered_on_grid(scanned(outer, 5)) == expected
    assert in_any_order(compiled_on_grid(scanned(outer, 5))) == in_any_order(expected)


def test_a_reverse_scan_and_a_loop_of_no_trips_are_counted() -> None:
    def backwards(x: jax.Array) -> jax.Array:
        ys = jnp.zeros((6, 64))
        body = lambda c, y: (lax.psum(c + y, "x"), None)  # noqa: E731
        return lax.scan(body, x, ys, reverse=True)[0]

    assert [each.count for each in lowered_on_grid(backwards)] == [6]
    assert lowered_on_grid(scanned(lambda x: lax.psum(x, "x"), 0)) == ()


@pytest.mark.parametrize(
    ("start", "test", "step", "trips"),
    [
        (0, lambda i: i < 5, lambda i: i + 1, 5),
        (2, lambda i: i <= 9, lambda i: 3 + i, 3),
        (7, lambda i: i > 0, lambda i: i - 2, 4),
        (7, lambda i: 1 <= i, lambda i: i + -1, 7),
        (0, lambda i: i != 6, lambda i: i + 2, 3),
        (0, lambda i: i < 5, jax.jit(lambda i: i + 1), 5),
        (0, lambda i: i < 5, lambda i: lax.optimization_barrier(i) + 1, 5),
    ],
)
def test_a_while_loop_that_counts_is_counted(
    start: int, test: Callable[..., Any], step: Callable[..., Any], trips: int
) -> None:
    def fun(x: jax.Array) -> jax.Array:
        def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return step(carry[0]), lax.psum(carry[1], "x")

        return lax.while_loop(lambda c: test(c[0]), body, (start, x))[1]

    (found,) = lowered_on_grid(fun)
    assert (found.count, found.unbounded) == (trips, False)


def test_a_loop_of_unknown_trip_count_is_counted_once_and_marked() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda x: lax.pmax(x.sum(), "y") < 9, lambda x: lax.psum(x + 1, "x"), x
        )

    for found in (lowered_on_grid(fun), compiled_on_grid(fun)):
        assert sorted((each.groups, each.count) for each in found) == [(Y, 1), (X, 1)]
        assert all(each.unbounded for each in found)


@given(
    st.integers(-9, 9),
    st.integers(-9, 9),
    st.integers(-4, 4),
    st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
)
def test_trip_counts_are_those_of_the_loop_run(
    start: int, stop: int, step: int, direction: str
) -> None:
    tests = {
        "LT": int.__lt__,
        "LE": int.__le__,
        "GT": int.__gt__,
        "GE": int.__ge__,
        "NE": int.__ne__,
    }
    trips, counter = 0, start
    while tests[direction](counter, stop) and trips < 99:
        trips, counter = trips + 1, counter + step
    found = num_trips(start, stop, step, direction)
    # A counter that runs away, or starts behind its limit, is nobody's scan.
    assert found == trips or found is None and (trips in (0, 99) or step == 0)


def test_branches_are_all_counted_and_marked() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.cond(
            x.sum() > 0,
            lambda x: lax.psum(x, "x"),
            lambda x: lax.all_gather(x, "y", tiled=True)[:64],
            x,
        )

    expected = [
        Collective("all_gather", Y, "float32", 1024),
        Collective("all_reduce", X, "float32", 256, reduction="sum"),
    ]
    for found in (lowered_on_grid(fun), compiled_on_grid(fun)):
        assert sorted(found) == expected
        assert all(each.conditional for each in found)


def test_a_function_called_twice_is_counted_twice() -> None:
    inner = jax.jit(lambda x: lax.psum(x * x, "x"))
    found = lowered_on_grid(lambda x: inner(inner(x)))
    assert found == (Collective("all_reduce", X, "float32", 256, reduction="sum"),) * 2


def test_the_gradient_of_a_rematerialized_scan_holds_the_recomputed_gathers() -> None:
    """ZeRO-3: gather weights in the forward and backward pass, scatter gradients."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ lax.all_gather(w, "y", tiled=True)), None

        return lax.psum(lax.scan(layer, x, w)[0].sum(), "x")

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(loss)(w, x)

    args = (jnp.zeros((3, 2, 8)), jnp.zeros((4, 8)))
    whole, shard = 8 * 8 * 4, 2 * 8 * 4
    planned = (
        Collective("all_gather", Y, "float32", whole, 6),
        Collective("reduce_scatter", Y, "float32", shard, 3, "sum"),
        Collective("all_reduce", X, "float32", 4, 1, "sum"),
    )
    for found in (lowered_on_grid(fun, *args), compiled_on_grid(fun, *args)):
        assert in_any_order(found) == in_any_order(planned)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("bfloat16", 16), ("int32", 32), ("uint8", 8), ("bool", 8), ("complex64", 64)],
)
def test_element_types_have_numpy_names_and_sizes(dtype: str, num_bytes: int) -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, ("x", "y"), ring(8))

    (found,) = lowered_on_grid(fun, jnp.zeros(8, dtype))
    assert (found.dtype, found.bytes) == (dtype, num_bytes)
    (found,) = compiled_on_grid(fun, jnp.zeros(8, dtype))
    # The CPU has no bfloat16.
    expected = ("float32", 32) if dtype == "bfloat16" else (dtype, num_bytes)
    assert (found.dtype, found.bytes) == expected


def test_reductions_of_booleans_are_and_and_or() -> None:
    flags = jnp.zeros(8, bool)
    for reader in (lowered_on_grid, compiled_on_grid):
        (any_of,) = reader(lambda x: lax.pmax(x, "x"), flags)
        (all_of,) = reader(lambda x: lax.pmin(x, "x"), flags)
        assert (any_of.reduction, all_of.reduction) == ("or", "and")


def test_the_order_of_a_group_counts_unless_its_members_are_reduced() -> None:
    def fun(x: jax.Array) -> list[jax.Array]:
        return [lax.psum(x, ("y", "x")), lax.all_gather(x, ("y", "x"), tiled=True)]

    reduced, gathered = lowered_on_grid(fun)
    assert reduced.groups == ALL
    assert gathered.groups == ((0, 4, 1, 5, 2, 6, 3, 7),)


def test_the_source_names_the_operator() -> None:
    (found,) = lowered_on_grid(lambda x: lax.psum(x, "x"))
    assert found.source == "psum"
    (found,) = compiled_on_grid(lambda x: lax.psum(x, "x"))
    assert found.source.endswith("/psum")
    assert found == Collective("all_reduce", X, "float32", 256, reduction="sum")


def test_many_devices_print_their_groups_in_another_way() -> None:
    mesh = jax.sharding.AbstractMesh((32, 8), ("x", "y"), (AxisType.Auto,) * 2)
    spec = PartitionSpec()
    mapped = jax.shard_map(
        lambda x: lax.psum(x, "y"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    lowered = jax.jit(mapped).trace(VECTOR).lower(lowering_platforms=("cuda",))
    (found,) = collectives_in_lowered(lowered)
    assert found.groups == MeshShape(("x", "y"), (32, 8)).groups(["y"])


def test_a_collective_prints_on_one_line_and_checks_its_kind() -> None:
    collective = Collective("all_reduce", X, "float32", 2048, 4, "sum", "loss")
    text = "all_reduce(sum) 4 x 2,048 B float32 over {{0,4},{1,5},{2,6},{3,7}}  # loss"
    assert str(collective) == text
    with pytest.raises(ValueError, match="`kind` .* must be one of .*, but got 'sum'"):
        Collective("sum", X, "float32", 4)
    with pytest.raises(ValueError, match="must be .source, target. pairs, but got"):
        Collective("collective_permute", ALL, "float32", 4)
