"""Flops against XLA's own count on a single device, and the roofline."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Jaxpr

from autopar.clusters.cluster import Cluster
from autopar.costs.compute import (
    FUSED_FRACTION,
    TRANSCENDENTAL_FLOPS,
    Shape,
    flops,
    is_fusable,
    operator_seconds,
)
from autopar.graph.work import is_heavy

Fun: TypeAlias = Callable[..., Any]

CLUSTER = Cluster.preset("H100")


def shape_of(aval: Any) -> Shape:
    """jax's type for avals leaves the shape out."""
    return aval.shape


def flops_by_eqn(fun: Fun, *args: jax.ShapeDtypeStruct) -> list[float]:
    """`flops` of each eqn of a function, those inside its jits included."""

    def count(jaxpr: Jaxpr) -> Iterator[float]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jit":
                yield from count(eqn.params["jaxpr"].jaxpr)
                continue
            operand_shapes = [shape_of(var.aval) for var in eqn.invars]
            result_shapes = [shape_of(var.aval) for var in eqn.outvars]
            yield flops(eqn.primitive.name, eqn.params, operand_shapes, result_shapes)

    return list(count(jax.make_jaxpr(fun)(*args).jaxpr))


def xla_flops(fun: Fun, *args: jax.ShapeDtypeStruct) -> float:
    """Flops that XLA counts in the lowered program."""
    counted = jax.jit(fun).lower(*args).cost_analysis()
    return counted.get("flops", 0.0) if counted else 0.0


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs"),
    [
        ("mk,kn->mn", (16, 32), (32, 8)),
        ("bmk,bkn->bmn", (3, 16, 32), (3, 32, 8)),
        ("bqhd,bkhd->bhqk", (2, 5, 3, 7), (2, 6, 3, 7)),
        ("k,k->", (32,), (32,)),
        ("mkj,kjn->mn", (4, 3, 5), (3, 5, 2)),
    ],
)
def test_flops_of_products_are_xlas(equation: str, lhs: Shape, rhs: Shape) -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, y)

    letters, sizes = "".join(equation.split("->")[0].split(",")), (*lhs, *rhs)
    by_letter = dict(zip(letters, sizes, strict=True))
    ours = sum(flops_by_eqn(product, spec(*lhs), spec(*rhs)))
    assert ours == xla_flops(product, spec(*lhs), spec(*rhs))
    assert ours == 2 * math.prod(by_letter.values())


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[dict[str, Any], Shape, Shape]:
    size = st.integers(1, 3)
    groups, batch_groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    channels = draw(size) * groups
    options: dict[str, Any] = dict(
        window_strides=(draw(size), draw(size)),
        padding=[(draw(size), draw(size)) for _ in range(2)],
        lhs_dilation=(draw(size), draw(size)),
        rhs_dilation=(draw(size), draw(size)),
        dimension_numbers=draw(
            st.sampled_from([("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")])
        ),
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )
    by_letter = dict(
        N=draw(size) * batch_groups,
        C=channels,
        H=draw(st.integers(7, 9)),
        W=draw(st.integers(7, 9)),
    )
    window = dict(
        O=draw(size) * groups * batch_groups,
        I=channels // groups,
        H=draw(size),
        W=draw(size),
    )
    lhs_letters, rhs_letters, _ = options["dimension_numbers"]
    lhs = tuple(by_letter[letter] for letter in lhs_letters)
    rhs = tuple(window[letter] for letter in rhs_letters)
    return options, lhs, rhs


@settings(max_examples=25)
@given(convolutions())
def test_flops_of_convolutions_are_xlas(
    drawn: tuple[dict[str, Any], Shape, Shape],
) -> None:
    options, lhs, rhs = drawn

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, **options)

    ours = sum(flops_by_eqn(convolve, spec(*lhs), spec(*rhs)))
    assert ours == xla_flops(convolve, spec(*lhs), spec(*rhs))


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (lambda x, y: x + y * x, [(8, 4), (8, 4)]),
        (lambda x: jnp.maximum(x, 0.0) - x, [(8, 4)]),
        (lambda x: jax.lax.transpose(x, (1, 0)), [(8, 4)]),
        (lambda x: jax.lax.slice(x, (0, 0), (4, 4)), [(8, 4)]),
    ],
)
def test_flops_of_elementwise_and_moving_operators_are_xlas(
    fun: Fun, shapes: list[Shape]
) -> None:
    args = [spec(*shape) for shape in shapes]
    assert sum(flops_by_eqn(fun, *args)) == xla_flops(fun, *args)


@pytest.mark.parametrize(
    ("fun", "shapes", "expected"),
    [
        (lambda x: jax.lax.reduce_sum(x, axes=(0,)), [(8, 4)], 32),
        (lambda x: jax.lax.argmax(x, 1, np.int32), [(8, 4)], 32),
        (lambda x: jax.lax.cumsum(x, axis=1), [(8, 4)], 32),
        (lambda x: jnp.exp(x), [(8, 4)], 32 * TRANSCENDENTAL_FLOPS),
        (lambda x: jax.lax.integer_pow(x, 3), [(8, 4)], 64),
        (lambda x: jax.lax.sort(x, dimension=1), [(8, 4)], 64),
        (lambda x: jax.lax.top_k(x, 3), [(8, 4)], 64),
        (lambda x: jax.lax.fft(x, "RFFT", (4,)), [(8, 4)], 320),
        (
            lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False),
            [(2, 6, 6)],
            144,
        ),
        (lambda x: jax.lax.linalg.svd(x), [(6, 3)], 20 * 54),
        (lambda x: x.at[jnp.array([0, 1])].add(1.0), [(8, 4)], 8),
        (lambda x: jax.lax.broadcast_in_dim(x, (8, 4), (1,)), [(4,)], 0),
    ],
)
def test_flops_of_other_operators(
    fun: Fun, shapes: list[Shape], expected: float
) -> None:
    # Some come with index arithmetic or masks around them.
    counted = flops_by_eqn(fun, *(spec(*shape) for shape in shapes))
    assert max(counted) == pytest.approx(expected)


def test_a_ragged_product_counts_each_row_once() -> None:
    def product(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, y, sizes)

    sizes = jax.ShapeDtypeStruct((4,), np.int32)
    args = (spec(16, 8), spec(4, 8, 3), sizes)
    assert sum(flops_by_eqn(product, *args)) == 2 * 16 * 8 * 3


def test_local_shapes_are_what_counts() -> None:
    params = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    whole = flops("dot_general", params, [(64, 128), (128, 512)], [(64, 512)])
    part = flops("dot_general", params, [(32, 128), (128, 128)], [(32, 128)])
    assert whole == 8 * part


def test_an_eqn_with_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="'scan' holds a jaxpr; sum its body's"):
        flops("scan", {}, [], [])


def test_heavy_operators_are_those_whose_work_outgrows_their_data() -> None:
    for name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "lu"):
        assert is_heavy(name)
        assert not is_fusable(name)
    for name in ("add", "reduce_sum", "sort", "gather", "transpose", "while"):
        assert not is_heavy(name)
    assert is_fusable("add")
    assert not is_fusable("sort")


def test_a_product_takes_the_longer_of_flops_and_bytes_and_a_launch() -> None:
    device, launch = CLUSTER.device, CLUSTER.kernel_seconds
    seconds = operator_seconds("dot_general", 1e12, 1e6, jnp.bfloat16, CLUSTER)
    reached = device.flops_per_second(jnp.bfloat16, 1e12)
    assert seconds == pytest.approx(launch + 1e12 / reached)
    assert reached == pytest.approx(989e12 * 0.69, rel=0.02)
    seconds = operator_seconds("dot_general", 1e6, 1e9, "bfloat16", CLUSTER)
    assert seconds == pytest.approx(launch + 1e9 / device.bytes_per_second)


def test_a_fused_operator_pays_part_of_its_bytes_and_no_launch() -> None:
    bandwidth = CLUSTER.device.bytes_per_second
    seconds = operator_seconds("add", 1e6, 1.2e7, np.float32, CLUSTER)
    assert seconds == pytest.approx(FUSED_FRACTION * 1.2e7 / bandwidth)
    assert operator_seconds("reshape", 0.0, 1e9, np.float32, CLUSTER) == 0.0


@pytest.mark.parametrize(
    ("dtype", "reached"),
    [
        (jnp.bfloat16, 0.71 * 989e12),
        (np.dtype("float32"), 0.745 * 495e12),
        (np.float16, 0.71 * 989e12),
        (jnp.float8_e4m3fn, 0.7 * 1979e12),
        ("uint8", 0.7 * 1979e12),
        (np.int32, 0.745 * 495e12),
        (np.complex64, 0.745 * 495e12),
        (np.float64, 0.7 * 67e12),
        (jax.random.key(0).dtype, 0.745 * 495e12),
    ],
    ids=str,
)
def test_each_dtype_has_a_rate(dtype: Any, reached: float) -> None:
    assert CLUSTER.device.flops_per_second(dtype) == pytest.approx(reached)
