"""`microbatch_semantics="independent"` against a loop over microbatches, by hand."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel, ShardParallel
from autopar.microbatches.microbatches import BatchCoupledError
from tests.marks import slow
from tests.random_arrays import normal

Independent = partial(ShardParallel, microbatch_semantics="independent")


def assert_equal(got: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def by_hand(
    loss: Callable[..., Any], update: Callable[..., Any], number: int
) -> Callable[..., Any]:
    """The reference: gradients and metrics of each microbatch, averaged, one update.

    `loss(params, batch)` returns a loss and auxiliary values; integers are summed, and
    what is called "max" is the greatest.
    """

    def joined(path: Any, *values: Any) -> Any:
        if "max" in jax.tree_util.keystr(path):
            return jnp.stack(values).max(0)
        total: Any = sum(values[1:], values[0])
        return total / number if jnp.issubdtype(total.dtype, jnp.inexact) else total

    def step(state: Any, batch: Any) -> Any:
        parts = [
            jax.tree.map(itemgetter(slice(m, None, number)), batch)
            for m in range(number)
        ]
        found = [
            jax.value_and_grad(partial(loss, state), has_aux=True)(state["params"], p)
            for p in parts
        ]
        (value, aux), grads = jax.tree.map_with_path(joined, *found)
        return update(state, value, aux, grads)

    return step


def as_step(loss: Callable[..., Any], update: Callable[..., Any]) -> Callable[..., Any]:
    """The step a user writes for the whole batch."""

    def step(state: Any, batch: Any) -> Any:
        grad = jax.value_and_grad(partial(loss, state), has_aux=True)
        (value, aux), grads = grad(state["params"], batch)
        return update(state, value, aux, grads)

    return step


optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3))


def batch_norm_model() -> tuple[Any, Any, Any, Any]:
    """Two layers with BatchNorm, whose running statistics are state."""

    def loss(state: Any, params: Any, batch: Any) -> Any:
        x, stats = batch["x"] @ params["w"], {}
        x = jnp.tanh(x)
        mean, var = x.mean(0), x.var(0)
        stats["mean"] = 0.9 * state["stats"]["mean"] + 0.1 * mean
        stats["var"] = 0.9 * state["stats"]["var"] + 0.1 * var
        x = (x - mean) / jnp.sqrt(var + 1e-3) * params["scale"]
        logits = x @ params["v"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        right = (logits.argmax(-1) == batch["y"]).sum()
        return losses.mean(), (stats, right)

    def update(state: Any, value: Any, aux: Any, grads: Any) -> Any:
        stats, right = aux
        updates, moments = optimizer.update(grads, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        new = {
            "params": params,
            "moments": moments,
            "stats": stats,
            "seen": state["seen"] + right,
        }
        return new, {"loss": value, "norm": optax.global_norm(grads), "right": right}

    params = {"w": normal(0, 16, 32), "scale": jnp.ones(32), "v": normal(1, 32, 8)}
    state = {
        "params": params,
        "moments": optimizer.init(params),
        "stats": {"mean": jnp.zeros(32), "var": jnp.ones(32)},
        "seen": jnp.zeros((), jnp.int32),
    }
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 8, 32))
    return loss, update, state, {"x": normal(2, 32, 16), "y": labels}


def contrastive_model() -> tuple[Any, Any, Any, Any]:
    """Every example is a negative of every other: the loss sees batch x batch."""

    def loss(state: Any, params: Any, batch: Any) -> Any:
        left, right = batch["a"] @ params["w"], jnp.tanh(batch["b"] @ params["v"])
        logits = left @ right.T
        labels = jnp.arange(logits.shape[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {"max": losses.max()}

    def update(state: Any, value: Any, aux: Any, grads: Any) -> Any:
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params}, (value, aux)

    params = {"w": normal(0, 16, 8) / 4, "v": normal(1, 16, 8) / 4}
    return (
        loss,
        update,
        {"params": params},
        {"a": normal(2, 32, 16), "b": normal(3, 32, 16)},
    )


def balanced_experts_model() -> tuple[Any, Any, Any, Any]:
    """A mixture of experts whose auxiliary loss multiplies two means over the batch."""

    def loss(state: Any, params: Any, batch: Any) -> Any:
        gates = jax.nn.softmax(batch["x"] @ params["gate"])
        chosen = jax.nn.one_hot(gates.argmax(-1), 4)
        hidden = jnp.einsum("bd,edh->beh", batch["x"], params["experts"])
        y = jnp.einsum("beh,be->bh", jnp.tanh(hidden), chosen * gates)
        balance = 4 * (gates.mean(0) * chosen.mean(0)).sum()
        return jnp.square(y - batch["y"]).mean() + 0.1 * balance, balance

    def update(state: Any, value: Any, aux: Any, grads: Any) -> Any:
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params}, (value, aux)

    params = {"gate": normal(0, 16, 4), "experts": normal(1, 4, 16, 8)}
    return (
        loss,
        update,
        {"params": params},
        {"x": normal(2, 32, 16), "y": normal(3, 32, 8)},
    )


@pytest.mark.parametrize(
    ("number", "model"),
    [
        (2, batch_norm_model),
        (4, contrastive_model),
        slow(4, balanced_experts_model),
        slow(4, batch_norm_model),
        slow(2, contrastive_model),
        slow(2, balanced_experts_model),
    ],
)
def test_gpi_5_a_batch_coupled_step_equals_the_loop_by_hand(model: Any, number: int):
    loss, update, state, batch = model()
    fun = as_step(loss, update)
    step = parallelize(fun, method=Independent(number), mesh="x:4;y:2")
    step.lower(state, batch).compile().audit().raise_if_wrong()
    expected, got = (state, None), (jax.tree.map(jnp.copy, state), None)
    reference = jax.jit(by_hand(loss, update, number))
    for _ in range(3):
        expected, got = reference(expected[0], batch), step(got[0], batch)
    assert_equal(got, expected)
    whole = jax.jit(fun)(state, batch)[0]["params"]
    part = reference(state, batch)[0]["params"]
    difference = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
    )
    assert difference > 1e-4  # or the test says nothing


@pytest.mark.parametrize(
    "model",
    [slow(batch_norm_model), slow(contrastive_model), balanced_experts_model],
)
def test_gpi_5_a_batch_coupled_step_is_a_pipeline_of_independent_parts(model: Any):
    loss, update, state, batch = model()
    method = PipelineParallel(2, 4, microbatch_semantics="independent")
    step = parallelize(as_step(loss, update), method=method)
    expected, got = (state, None), (jax.tree.map(jnp.copy, state), None)
    reference = jax.jit(by_hand(loss, update, 4))
    for _ in range(2):
        expected, got = reference(expected[0], batch), step(got[0], batch)
    assert_equal(got, expected)


@pytest.mark.parametrize("method", [ShardParallel(2), PipelineParallel(2, 2)])
def test_gpi_5_it_is_refused_by_default(method: Any):
    loss, update, state, batch = batch_norm_model()
    step = parallelize(as_step(loss, update), method=method)
    with pytest.raises(BatchCoupledError, match='microbatch_semantics="independent"'):
        step(state, batch)


def test_values_for_each_example_come_back_in_the_order_of_the_batch():
    def fun(w: jax.Array, x: jax.Array) -> Any:
        y = x @ w
        y = (y - y.mean(0)) / y.std(0)
        return y, y.sum(1), jnp.stack([y, y], axis=1).swapaxes(0, 1), y.max()

    w, x = normal(0, 8, 4), normal(1, 16, 8)
    step = parallelize(fun, method=Independent(2), batch_argnums=1)
    got = step(w, x)
    parts = [jax.jit(fun)(w, x[m::2]) for m in range(2)]
    for m, part in enumerate(parts):
        assert_equal([got[0][m::2], got[1][m::2], got[2][:, m::2]], list(part[:3]))
    assert_equal(got[3], jnp.maximum(parts[0][3], parts[1][3]))


@pytest.mark.parametrize("size", [slow(16), 40])
def test_results_of_joined_batches_come_back_in_their_order(size: int):
    def fun(w: jax.Array, x: jax.Array, more: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            found = jnp.tanh(jnp.concatenate([x, more]) @ w)
            return jnp.square(found).mean(), found

        (_, found), grad = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grad, found

    args = normal(0, 8, 4), normal(1, 16, 8), normal(2, size, 8)
    step = parallelize(fun, method=Independent(4), batch_argnums=(1, 2))
    assert_equal(step(*map(jnp.copy, args)), jax.jit(fun)(*args))


def test_a_result_whose_examples_are_not_told_apart_is_refused():
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        found = jnp.sort(x @ w, axis=0)
        return jnp.concatenate([found, found])

    step = parallelize(fun, method=Independent(2), batch_argnums=1)
    with pytest.raises(BatchCoupledError, match=r"is \[16, 4\] for a microbatch"):
        step(normal(0, 8, 4), normal(1, 16, 8))


def test_exact_and_independent_agree_where_examples_do_not_meet():
    def fun(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
        return w - grad / jnp.sqrt(jnp.square(grad).sum()), value

    w, x = normal(0, 8, 8), normal(1, 16, 8)
    found = []
    for method in (ShardParallel(4), Independent(4)):
        found.append(parallelize(fun, method=method, batch_argnums=1)(w + 0, x))
    assert_equal(*found)


def test_gradients_clipped_for_each_example_are_clipped_before_the_mean():
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        grads = jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0))(w, x)
        norms = jnp.sqrt(jnp.square(grads).sum((1, 2)))
        clipped = grads / jnp.maximum(norms, 0.5)[:, None, None]
        return w - clipped.mean(0)

    w, x = normal(0, 8, 4), normal(1, 16, 8)
    got = parallelize(fun, method=Independent(4), batch_argnums=1)(w + 0, x)
    assert_equal(got, jax.jit(fun)(w, x))


def test_an_update_without_gradients_is_refused():
    def fun(w: jax.Array, x: jax.Array) -> Any:
        gradient = x.T @ (x @ w)
        return w - gradient / jnp.sqrt(jnp.square(gradient).sum()), gradient[0]

    step = parallelize(fun, method=Independent(2), batch_argnums=1)
    with pytest.raises(ValueError, match=r"updated without any; compute them with"):
        step(normal(0, 8, 8), normal(1, 16, 8))


def test_a_value_that_couples_all_examples_cannot_be_returned():
    step = parallelize(
        lambda w, x: (x @ w) @ x.T, method=Independent(2), batch_argnums=1
    )
    with pytest.raises(BatchCoupledError, match=r"is \[8, 8\] for a microbatch"):
        step(normal(0, 8, 8), normal(1, 16, 8))


def test_a_flag_is_no_mean():
    step = parallelize(
        lambda w, x: (x @ w).sum() > 0, method=Independent(2), batch_argnums=1
    )
    with pytest.raises(NotImplementedError, match="is bool"):
        step(normal(0, 8, 8), normal(1, 16, 8))


def test_a_step_that_is_another_program_for_a_microbatch_is_refused():
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum() if x.shape[0] > 8 else (x @ w).sum()

    step = parallelize(fun, method=Independent(2), batch_argnums=1)
    with pytest.raises(BatchCoupledError, match=r"differ from '.*tanh.*' at .*:\d+"):
        step(normal(0, 8, 8), normal(1, 16, 8))


def test_a_typo_names_both():
    with pytest.raises(ValueError, match="must be 'exact' or 'independent'"):
        parallelize(lambda x: x, method=ShardParallel(2, "independant"))  # type: ignore[arg-type]
