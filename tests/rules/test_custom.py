"""Primitives of one's own: whole without a rule, split by a rule like an einsum."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

import autopar
from autopar.jax_compat import mlir
from autopar.rules import base
from tests.rules.strategy_oracle import (
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)

X = random_array(4, 8, 16)
W = random_array(4, 16, 8, seed=1)
BIG = random_array(64, 32)


@pytest.fixture(autouse=True)
def _forget_rules() -> Iterator[None]:
    before = dict(base._RULES)
    yield
    base._RULES.clear()
    base._RULES.update(before)


def new_primitive(name: str, function: Any) -> Primitive:
    """A primitive that computes `function` of its operands by code of its own."""
    primitive = Primitive(name)
    primitive.def_impl(function)
    primitive.def_abstract_eval(
        lambda *avals, **params: jax.typeof(
            jax.eval_shape(
                partial(function, **params),
                *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals),
            )
        )
    )
    lowered = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(primitive, lambda *args, **kwargs: lowered(*args, **kwargs))
    return primitive


product_p = new_primitive("my_product", lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w))
largest_p = new_primitive("my_largest", lambda x: x.max(1))
padded_p = new_primitive("my_padded", lambda x, *, shape: jnp.zeros(shape, x.dtype))


def test_every_strategy_of_an_einsum_like_rule() -> None:
    autopar.register_rule(product_p, "b m k, b k n -> b m n")
    op = operator_of("my_product", product_p.bind, X, W)
    assert factor_table(op) == {
        "b": ((0, 0), (0,)),
        "k": ((2, 1), (-2,)),
        "m": ((1, -1), (1,)),
        "n": ((-1, 2), (2,)),
    }
    reached = check_every_strategy(product_p.bind, X, W, kinds=("my_product",))
    assert reached["my_product"] == {"-", "b", "k", "m", "n"}


def test_a_reduction_by_max_and_blocked_names() -> None:
    autopar.register_rule("my_largest", "b m k -> b k", reduction="max")
    reached = check_every_strategy(largest_p.bind, X, kinds=("my_largest",))
    assert reached["my_largest"] == {"-", "b", "m", "k"}
    autopar.register_rule("my_largest", "b m _ -> b _", blocked="m")
    assert set(factor_table(operator_of("my_largest", largest_p.bind, X))) == {"b"}


def test_a_local_function_for_params_with_shapes() -> None:
    function = partial(padded_p.bind, shape=(4, 8, 16, 3))
    autopar.register_rule(
        "my_padded",
        "a b c -> a b c _",
        local=lambda x, shape: jnp.zeros((*x.shape, shape[-1]), x.dtype),
    )
    check_every_strategy(function, X, kinds=("my_padded",))
    autopar.register_rule("my_padded", "a b c -> a b c _")
    with pytest.raises(ValueError, match="pass `local`"):
        check_every_strategy(function, X, kinds=("my_padded",))


def test_a_split_primitive_in_a_step() -> None:
    autopar.register_rule(product_p, "b m k, b k n -> b m n")

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(product_p.bind(jnp.sin(x), w))

    parallel = autopar.parallelize(step, mesh="x:2;y:4")
    np.testing.assert_allclose(parallel(X, W), jax.jit(step)(X, W), 1e-4, 1e-5)
    assert not parallel.plan(X, W).sharding.collectives


def test_without_a_rule_it_is_whole_with_a_warning() -> None:
    def step(x: jax.Array) -> jax.Array:
        return largest_p.bind(x * 2) + 1

    big = random_array(8, 16, 32)
    parallel = autopar.parallelize(step, mesh="x:8")
    with pytest.warns(autopar.FallbackWarning, match=r"my_largest.*test_custom\.py"):
        value = parallel(big)
    np.testing.assert_allclose(value, jax.jit(step)(big), 1e-5)


def double_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def double(x: jax.Array) -> jax.Array:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double_kernel, kind, interpret=True, name="double")(x)


def row_sums(x: jax.Array) -> jax.Array:
    """A kernel with a grid and blocks, whose name is its function's."""

    def sum_kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...].sum(1, keepdims=True)

    rows, columns = x.shape
    return pl.pallas_call(
        sum_kernel,
        jax.ShapeDtypeStruct((rows, 1), x.dtype),
        grid=(rows // 4,),
        in_specs=[pl.BlockSpec((4, columns), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((4, 1), lambda i: (i, 0)),
        interpret=True,
    )(x)


def numbered(x: jax.Array) -> jax.Array:
    """A kernel that knows which of its steps it is in."""

    def add_number(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + pl.program_id(0)

    blocks = pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        add_number,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 4,),
        in_specs=[blocks],
        out_specs=blocks,
        interpret=True,
    )(x)


@pytest.mark.parametrize("kernel", [double, numbered])
@pytest.mark.parametrize("mesh", ["x:8", "x:2;y:4"])
def test_a_pallas_kernel_that_cannot_be_split_is_whole(kernel: Any, mesh: str) -> None:
    parallel = autopar.parallelize(lambda x: jnp.sin(kernel(x * 2)), mesh=mesh)
    with pytest.warns(autopar.FallbackWarning, match=r"register_rule\('pallas_call:"):
        value = parallel(BIG)
    np.testing.assert_allclose(value, jnp.sin(kernel(BIG * 2)), 1e-4, 1e-5)


def test_a_pallas_kernel_is_split_along_its_grid() -> None:
    """Blocks of rows, and what `vmap` adds to it, also where the kernel has numbers."""
    reached = check_every_strategy(row_sums, BIG, kinds=("pallas_call",))
    assert reached["pallas_call"] == {"-", "grid0"}
    stacked = jnp.stack([BIG, 2 * BIG, -BIG, BIG + 1])
    reached = check_every_strategy(jax.vmap(numbered), stacked, kinds=("pallas_call",))
    assert reached["pallas_call"] == {"-", "grid0"}
    parallel = autopar.parallelize(lambda x: jax.vmap(row_sums)(x * 2), mesh="x:2;y:4")
    np.testing.assert_allclose(
        parallel(stacked), 2 * stacked.sum(2, keepdims=True), 1e-4
    )
    (kernel,) = (
        op
        for op in parallel.plan(stacked).sharding.operators
        if op.kind == "pallas_call"
    )
    assert set(kernel.result_specs[0]) <= {0, 1}


def test_a_rule_for_a_pallas_kernel_by_its_name() -> None:
    autopar.register_rule("pallas_call:double", "i j -> i j", local=double)
    autopar.register_rule("pallas_call:sum_kernel", "i j -> i _", local=row_sums)
    reached = check_every_strategy(double, BIG, kinds=("pallas_call",))
    assert reached["pallas_call"] == {"-", "i", "j"}
    reached = check_every_strategy(row_sums, BIG, kinds=("pallas_call",))
    assert reached["pallas_call"] == {"-", "i", "j"}

    def step(x: jax.Array) -> jax.Array:
        return double(jnp.sin(x)).sum()

    parallel = autopar.parallelize(step, mesh="x:8", pins={"x": PartitionSpec("x")})
    np.testing.assert_allclose(parallel(BIG), jax.jit(step)(BIG), 1e-4)
    kinds = {c.kind for c in parallel.plan(BIG).sharding.collectives}
    assert kinds == {"all_reduce"}


def test_an_ffi_call() -> None:
    matrices = random_array(8, 3, 3)
    matrices = matrices @ matrices.transpose(0, 2, 1) + 3 * np.eye(3, dtype=np.float32)

    def cholesky(a: Any) -> jax.Array:
        kinds = (
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(a.shape[:-2], jnp.int32),
        )
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", kinds)
        return jnp.tril(call(a, uplo=np.uint8(ord("U")))[0])

    jnp.linalg.cholesky(matrices)  # registers the target
    expected = np.linalg.cholesky(matrices)
    np.testing.assert_allclose(cholesky(matrices), expected, 1e-4, 1e-5)
    parallel = autopar.parallelize(cholesky, mesh="x:8")
    np.testing.assert_allclose(parallel(matrices), expected, 1e-4, 1e-5)


def test_custom_partitioning_runs_what_it_partitions() -> None:
    @custom_partitioning
    def scaled(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 3

    scaled.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: None,
        sharding_rule="i j -> i j",
    )
    parallel = autopar.parallelize(lambda x: scaled(x).sum(), mesh="x:8")
    np.testing.assert_allclose(parallel(BIG), (np.tanh(BIG) * 3).sum(), 1e-4)


def test_a_primitive_without_abstract_evaluation_is_jaxs_error() -> None:
    nameless = Primitive("my_unevaluated")
    with pytest.raises(NotImplementedError, match="my_unevaluated"):
        autopar.parallelize(lambda x: nameless.bind(x), mesh="x:8")(X)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("my_product", "b m k"), "exactly one '->'"),
        (("my_product", "a -> b -> c"), "exactly one '->'"),
        (("my_product", "b b, b -> b"), "repeats one"),
        (("pallas_call", "i -> i"), "must name the one"),
        (("pallas_call:double", "i -> i"), "needs `local`"),
        (("ffi_call:target", "i -> i"), "needs `local`"),
    ],
)
def test_a_rule_that_cannot_be_read(arguments: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        autopar.register_rule(*arguments)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="names of the operands.*'q'"):
        autopar.register_rule("p", "a -> a", blocked="q")
    with pytest.raises(ValueError, match="sum, max, min.*'mean'"):
        autopar.register_rule("p", "a -> a", reduction="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("equation", "words"),
    [
        ("m k, k n -> m n", r"my_product.*ranks are \[3, 3, 3\].*\[2, 2, 2\]"),
        ("b m k -> b m n", r"operands.*\[3, 3, 3\].*\[3, 3\]"),
        ("b m k, b k m -> b m n", "'m' .* has (8 and 16|16 and 8)"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error_when_planned(
    equation: str, words: str
) -> None:
    autopar.register_rule("my_product", equation)
    wide = random_array(4, 16, 16)
    with pytest.raises(ValueError, match=words):
        autopar.parallelize(product_p.bind, mesh="x:2;y:4").plan(X, wide)
