"""State is what results are made of element by element; gradients replace nothing."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.frontend.derived_results import derived_results
from autopar.frontend.tracing import trace
from autopar.jax_compat import with_scan_counts
from autopar.planner.whole_step import roles_of
from tests.marks import slow

Params = dict[str, jax.Array]


def params_of(seed: int = 0) -> Params:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "first": jax.random.normal(keys[0], (16, 32)) / 4,
        "second": jax.random.normal(keys[1], (32, 16)) / 6,
    }


def loss_of(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] - x) ** 2)


X = jnp.linspace(-1.0, 1.0, 64 * 16).reshape(64, 16)


def state_of(fun: Any, *args: Any) -> set[str]:
    traced = trace(fun, args, {})
    roles = roles_of(traced).roles
    paths = zip(roles, traced.input_paths, strict=True)
    return {path.split("[")[0] for role, path in paths if role == "state"}


def test_distances_count_elementwise_operators_on_the_way() -> None:
    def step(p: Any, m: Any, x: Any) -> Any:
        m = 0.9 * m + x.T @ x
        return p - 0.1 * m, m, p, x @ x.T

    square = jnp.ones((4, 4))
    found = derived_results(jax.make_jaxpr(step)(square, square, square).jaxpr)
    distances = [each.distances for each in found]
    assert distances == [{0: 1, 1: 4}, {1: 2}, {0: 0}, {}]


def test_what_loops_branches_and_calls_return_is_made_of_what_they_read() -> None:
    def step(h: Any, p: Any, w: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=3)
        g = jax.lax.while_loop(lambda g: g[0, 0] < 9, lambda g: g @ w + 1, p)
        p = jax.lax.cond(p[0, 0] > 0, lambda p: -p, lambda p: p @ w, p)
        return h, g, p, jax.jit(jnp.sin)(w), w.at[0].set(0.0)

    square = jnp.ones((4, 4))
    found = derived_results(jax.make_jaxpr(step)(square, square, square).jaxpr)
    distances = [each.distances for each in found]
    assert distances == [{0: 0}, {1: 0}, {1: 1}, {2: 1}, {2: 1}]


def test_gradients_leave_the_parameters_as_they_are() -> None:
    step = autopar.parallelize(jax.value_and_grad(loss_of), mesh="x:8")
    oracle, params = jax.jit(jax.value_and_grad(loss_of)), params_of()
    expected = params
    for _ in range(3):  # from the second on, they lie as they are planned to
        loss, gradients = step(params, X)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        value, own = oracle(expected, X)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, own)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert state_of(jax.value_and_grad(loss_of), params, X) == set()


@pytest.mark.parametrize(
    ("order", "optimizer"),
    [
        ("params first", optax.adafactor(1e-2)),
        ("reference first", optax.adam(1e-2)),
        slow("params first", optax.adam(1e-2)),
        slow("reference first", optax.adafactor(1e-2)),
    ],
)
def test_a_reference_model_is_not_taken_for_state(optimizer: Any, order: str) -> None:
    """Its tree is that of the parameters, and of Adam's moments."""
    params, reference = params_of(), params_of(1)

    def update(params: Params, reference: Params, state: Any, x: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            return loss_of(params, x) + loss_of(reference, x @ params["first"][:, :16])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def turned(reference: Params, params: Params, state: Any, x: jax.Array) -> Any:
        return update(params, reference, state, x)

    is_first = order == "params first"
    fun, state = (update if is_first else turned), optimizer.init(params)
    models = (params, reference) if is_first else (reference, params)
    assert state_of(fun, *models, state, X) == {"params", "state"}
    step = autopar.parallelize(fun, mesh="x:8")
    for _ in range(3):
        models = (params, reference) if is_first else (reference, params)
        params, state, value = step(*models, state, X)
        assert not any(each.is_deleted() for each in jax.tree.leaves(reference))
        assert np.isfinite(value)


def test_state_that_is_updated_as_one_vector_is_still_state() -> None:
    def step(params: Params, x: jax.Array) -> Params:
        flat, restore = jax.flatten_util.ravel_pytree(params)
        gradient, _ = jax.flatten_util.ravel_pytree(jax.grad(loss_of)(params, x))
        return restore(flat - 0.1 * gradient)

    def gradient_as_one(params: Params, x: jax.Array) -> Params:
        flat, restore = jax.flatten_util.ravel_pytree(jax.grad(loss_of)(params, x))
        return restore(flat / jnp.linalg.norm(flat))

    assert state_of(step, params_of(), X) == {"params"}
    assert state_of(gradient_as_one, params_of(), X) == set()


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_running_average_before_its_model_has_the_result_of_its_own(
    is_copied: bool,
) -> None:
    def step(average: Params, params: Params, x: jax.Array) -> Any:
        gradients = jax.grad(loss_of)(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        if is_copied:
            return params, params
        average = jax.tree.map(lambda a, p: a + 0.1 * (p - a), average, params)
        return params, average

    traced = trace(step, (params_of(), params_of(1), X), {})
    assert roles_of(traced).next_output[:4] == (2, 3, 0, 1)


def test_scans_of_jax_0_11_say_their_counts_otherwise() -> None:
    """There `ft_in` has the trees of constants, carries and slices."""

    def step(a: jax.Array, b: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(lambda c, x: (0.9 * c + a.sum() * x, 2 * x), b, xs)

    jaxpr = jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(3), jnp.ones((5, 3))).jaxpr
    (position,) = (k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "scan")
    scan = jaxpr.eqns[position]
    params = dict(with_scan_counts(scan.params))
    consts, carry = params.pop("num_consts"), params.pop("num_carry")
    trees = (0,) * consts, (0,) * carry, (0,) * (len(scan.invars) - consts - carry)
    params["ft_in"] = SimpleNamespace(unpack=lambda: trees)
    eqns = list(jaxpr.eqns)
    eqns[position] = scan.replace(params=params)
    found = derived_results(jaxpr)
    assert found[0].distances and derived_results(jaxpr.replace(eqns=eqns)) == found
