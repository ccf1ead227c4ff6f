"""Elementwise operators: every dim, size-1 dims and scalars, and pending sums."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from autopar.graph.op_graph import Constant
from autopar.rules.elementwise import NARY, UNARY
from autopar.sharding.spec import REPLICATED, SUM
from tests.marks import slow
from tests.rules.strategy_oracle import (
    MESH_2X2X2,
    MESH_2X4,
    check_every_strategy,
    factor_sizes,
    factor_table,
    operator_of,
    random_array,
)

FLOAT_UNARY = (
    *(lax.abs, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e),
    *(lax.bessel_i1e, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf),
    *(lax.erf_inv, lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.is_finite),
    *(lax.lgamma, lax.log, lax.log1p, lax.logistic, lax.neg, lax.round, lax.rsqrt),
    *(lax.sign, lax.sin, lax.sinh, lax.sqrt, lax.square, lax.tan, lax.tanh, jnp.copy),
    *(lambda x: lax.acosh(x + 2), lambda x: lax.integer_pow(x, 3)),
    *(lambda x: lax.reduce_precision(x, 8, 7), lambda x: checkpoint_name(x, "here")),
)
INTEGER_UNARY = (lax.clz, lax.population_count, lax.bitwise_not, lax.sign, lax.abs)
FLOAT_BINARY = (
    *(lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.atan2),
    *(lax.nextafter, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, lax.complex),
    *(lambda x, y: lax.pow(abs(x), y), lambda x, y: lax.igamma(abs(x) + 1, abs(y))),
    *(lambda x, y: lax.igammac(abs(x) + 1, abs(y)), primitives.add_jaxvals_p.bind),
    lambda x, y: lax.zeta(abs(x) + 2, abs(y) + 1),
)
INTEGER_BINARY = (
    *(
        lax.bitwise_and,
        lax.bitwise_or,
        lax.bitwise_xor,
        lax.shift_left,
    ),
    *(lax.shift_right_arithmetic, lax.shift_right_logical, lax.add, lax.rem, lax.max),
)


def random_integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 9, shape, dtype=np.int32)


def apply_all(functions: tuple[Callable, ...]) -> Callable:
    return lambda *args: [function(*args) for function in functions]


@pytest.mark.parametrize("shape", [(4, 6), slow((1, 8))])
def test_every_unary(shape: tuple[int, ...]) -> None:
    check_every_strategy(apply_all(FLOAT_UNARY), random_array(*shape), max_strategies=4)
    check_every_strategy(
        apply_all(INTEGER_UNARY), random_integers(*shape), max_strategies=4
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 6), (4, 6)),
        slow((3, 1, 8), (3, 1, 8)),
        ((), ()),
    ],
)
def test_every_binary(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for functions, make in (
        (FLOAT_BINARY, random_array),
        (INTEGER_BINARY, random_integers),
    ):
        check_every_strategy(
            apply_all(functions), make(*left), make(*right, seed=1), max_strategies=4
        )


def test_factors_of_a_sum() -> None:
    x = random_array(4, 1, 6)
    op = operator_of("add", lax.add, x, x)
    assert factor_table(op) == {
        "d0": ((0, 0), (0,)),
        "d2": ((2, 2), (2,)),
        "sum0,1": ((SUM, SUM), (SUM,)),
    }
    assert factor_sizes(op) == {"d0": 4, "d2": 6, "sum0,1": 0}


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    return primitives.mul_p.bind(x, y, out_dtype=None)


def test_dims_of_size_one_are_shared_by_none() -> None:
    x, row, column = random_array(4, 8), random_array(1, 8), random_array(4, 1)
    op = operator_of("mul", multiply, x, column)
    assert factor_table(op) == {
        "d0": ((0, 0), (0,)),
        "d1": ((1, REPLICATED), (1,)),
        "sum0": ((SUM, REPLICATED), (SUM,)),
        "sum1": ((REPLICATED, SUM), (SUM,)),
    }
    reached = check_every_strategy(multiply, x, row)
    assert reached["mul"] == {"-", "d0", "d1", "sum0", "sum1"}
    check_every_strategy(multiply, x, column)


def test_literals_are_whole() -> None:
    op = operator_of("mul", lambda x: 2.0 * x, random_array(4))
    names = set(factor_table(op))
    assert names == {"d0", f"sum{1 if isinstance(op.operands[0], Constant) else 0}"}
    check_every_strategy(lambda x: (2.0 * x - 1.0) / 3.0, random_array(8))


def test_sums_pass_into_complex_numbers_and_out_of_them() -> None:
    """As in the gradients of real parameters of a complex state space."""
    z = random_array(4, 8).astype(jnp.complex64)
    reached = check_every_strategy(lambda x: lax.complex(x, 0.0), random_array(4, 8))
    assert reached["complex"] == {"-", "d0", "d1", "sum0"}
    reached = check_every_strategy(
        lambda z: lax.convert_element_type_p.bind(
            z, new_dtype=jnp.float32, weak_type=False, sharding=None
        ),
        z,
    )
    assert "sum0" in reached["convert_element_type"]


@pytest.mark.parametrize("kind", ["mul", "add", "neg", "select_n"])
def test_integers_are_never_pending(kind: str) -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        return [x * x, x + x, -x, jnp.where(x > 2, x, x)]

    op = operator_of(kind, function, random_integers(4))
    assert set(factor_table(op)) == {"d0"}


def test_select_and_clamp() -> None:
    x, y = random_array(4, 8), random_array(4, 8, seed=1)
    reached = check_every_strategy(lambda x, y: jnp.where(x > 0, x, y), x, y)
    assert reached["select_n"] == {"-", "d0", "d1", "sum1,2"}
    check_every_strategy(lambda p, x, y: lax.select_n(p, x, y), x[0, 0] > 0, x, y)
    check_every_strategy(lambda x, y: lax.clamp(-0.5, x, y[0, 0]), x, y)
    check_every_strategy(lambda x, y: lax.clamp(y - 1, x, y), x, y)


@pytest.mark.parametrize(
    ("source", "target", "is_linear"),
    [
        ("float32", "complex64", True),
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "bfloat16", False),
        ("float32", "int32", False),
        ("int32", "float32", False),
        ("bool", "float32", False),
    ],
)
def test_pending_sums_pass_only_a_widening(
    source: str, target: str, is_linear: bool
) -> None:
    x = (4 * random_array(4, 8)).astype(jnp.dtype(source))
    reached = check_every_strategy(lambda x: x.astype(target), x)
    assert ("sum0" in reached["convert_element_type"]) == is_linear


def test_complex_numbers() -> None:
    x, y = random_array(2, 4), random_array(2, 4, seed=1)

    def function(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        z = lax.complex(x, y)
        return [lax.conj(z), lax.real(z), lax.imag(z), z * z, abs(z)]

    reached = check_every_strategy(function, x, y, max_strategies=16)
    assert reached["complex"] == {"-", "d0", "d1", "sum0,1"}
    assert all("sum0" in reached[kind] for kind in ("real", "imag", "mul"))


def test_rarer_ones() -> None:
    def function(a: jax.Array, x: jax.Array) -> list[jax.Array]:
        gradient = lax.igamma_grad_a(a, x)
        return [lax.betainc(a, a, x), lax.polygamma(a, x), gradient]

    a, x = np.array([1.0, 2.0], np.float32), np.array([0.2, 0.9], np.float32)
    check_every_strategy(function, a, x, max_strategies=2)


def test_bfloat16_and_unequal_axes() -> None:
    x = random_array(8, 6).astype(jnp.bfloat16)
    for mesh in (MESH_2X4, MESH_2X2X2):
        check_every_strategy(lambda x: lax.tanh(x) + x, x, mesh=mesh)


def test_every_registered_name_is_one_of_jax() -> None:
    names = {value.name for key, value in vars(primitives).items() if key[-2:] == "_p"}
    of_later_jax = {"log2", "one_minus_square"}  # from 0.11 on
    assert {*UNARY, *NARY} - of_later_jax <= names


def test_device_put_stays_where_the_plan_has_it() -> None:
    reached = check_every_strategy(lambda x: jax.device_put(x), random_array(4, 6))
    assert reached["device_put"] == {"-", "d0", "d1", "sum0"}


@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_bitcasts_keep_leading_dims(dtype: type) -> None:
    def function(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, dtype), np.float32)

    reached = check_every_strategy(function, random_array(4, 2))
    assert reached["bitcast_convert_type"] == {"-", "d0", "d1"}
