"""Primitives of libraries: what JAX traces to lower them is split as its operators."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import autopar
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.traced_function import Roles
from autopar.rules import base
from tests.marks import slow


def primitive(name: str, function: Callable[..., jax.Array]) -> Primitive:
    """One that is as `function` is, elementwise in its first operand."""
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda x, *_, **__: ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def own_lowering(name: str, rule: Any, platforms: tuple[str | None, ...]) -> Primitive:
    made = Primitive(name)
    made.def_impl(jnp.tanh)
    made.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
    for platform in platforms:
        mlir.register_lowering(made, rule, platform=platform)
    return made


def gated(x: jax.Array, *, scale: float) -> jax.Array:
    return x * jax.nn.sigmoid(scale * x)


gate_p = primitive("gate_of_a_library", gated)
ad.defjvp(
    gate_p, lambda t, x, scale: jax.jvp(lambda x: gated(x, scale=scale), [x], [t])[1]
)
settled_p = primitive(
    "loop_of_a_library",
    lambda x: lax.fori_loop(0, 3, lambda _, y: y - 0.1 * gate_p.bind(y, scale=2.0), x),
)
by_trace = mlir.lower_fun(jnp.tanh, multiple_results=False)
on_all_p = own_lowering("tanh_on_platforms", by_trace, ("cpu", "cuda", "tpu"))
kernel_p = own_lowering("tanh_by_a_kernel", lambda ctx, x: by_trace(ctx, x), (None,))
two_traces_p = own_lowering("tanh_by_two_functions", by_trace, (None,))
mlir.register_lowering(
    *(two_traces_p, mlir.lower_fun(lambda x: jnp.sinh(x) / jnp.cosh(x), False)),
    platform="cuda",
)
mixed_p = own_lowering("tanh_by_a_kernel_on_cuda", by_trace, (None,))
mlir.register_lowering(mixed_p, lambda ctx, x: by_trace(ctx, x), platform="cuda")

X = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
WEIGHTS = {"layers": jnp.stack([0.3 * jnp.eye(16)] * 4), "out": jnp.ones((16, 4)) / 9}


def kinds_of(fun: Callable[..., Any], *args: Any) -> set[str]:
    traced = trace(fun, args, {})
    count = len(traced.input_paths)
    roles = Roles(("other",) * count, (None,) * count, ())
    return {op.kind for op in build_graph(traced, roles).operators()}


def step(weights: Any, x: jax.Array) -> Any:
    def loss_of(weights: Any) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            x = x + gate_p.bind(x @ kernel, scale=1.5)
            return x + settled_p.bind(lax.stop_gradient(x)), None

        return jnp.mean(
            (lax.scan(layer, x, weights["layers"])[0] @ weights["out"]) ** 2
        )

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


@pytest.mark.parametrize("more", [slow({}), {"num_microbatches": 4}], ids=str)
def test_in_a_loop_over_layers(more: Any) -> None:
    parallel = autopar.parallelize(step, mesh="x:8", donate_argnums=(), **more)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.FallbackWarning)
        found = parallel(WEIGHTS, X)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(WEIGHTS, X)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("primitive", "kinds"),
    [
        *((on_all_p, {"tanh"}), (two_traces_p, {"tanh"})),
        *((kernel_p, {kernel_p.name}), (mixed_p, {mixed_p.name})),
    ],
    ids=str,
)
def test_code_of_its_own_is_kept(primitive: Primitive, kinds: set[str]) -> None:
    assert kinds_of(primitive.bind, X) == kinds


def test_sparse_products_are_split() -> None:
    dense = np.zeros((16, 32), np.float32)
    dense[::3, ::5] = 0.5
    kept = sparse.BCOO.fromdense(jnp.asarray(dense))

    def step(data: jax.Array, indices: jax.Array, x: jax.Array) -> Any:
        def loss_of(data: jax.Array) -> jax.Array:
            product = x @ sparse.BCOO((data, indices), shape=dense.shape)
            return jnp.mean((product - 1) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(data)
        return data - 0.1 * grad, loss

    arguments = kept.data, kept.indices, X
    parallel = autopar.parallelize(step, mesh="x:8", donate_argnums=())
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.FallbackWarning)
        found = parallel(*arguments)
    for one, other in zip(found, jax.jit(step)(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_rule_of_ones_own_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_RULES", {**base._RULES})
    ruled_p = primitive("ruled_by_a_library", jnp.tanh)
    autopar.register_rule(ruled_p, "a b -> a b")
    assert kinds_of(ruled_p.bind, X) == {ruled_p.name}


def test_a_solve_within_a_solve_and_arrays_put_together() -> None:
    def solved(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda x: a @ x,
            b,
            lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=9)[0],
            symmetric=True,
        )

    def solve(a: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.vmap(solved, (None, 0))(a @ a.T + jnp.eye(16), rows)

    a = WEIGHTS["layers"][0] + 0.1
    assert "custom_linear_solve" not in kinds_of(solve, a, X)
    parallel = autopar.parallelize(
        lambda a, x: (a, (solve(a, x) ** 2).mean()), num_microbatches=4, mesh="x:8"
    )
    expected = (jax.jit(solve)(a, X) ** 2).mean()
    np.testing.assert_allclose(parallel(a, X)[1], expected, rtol=1e-5)
