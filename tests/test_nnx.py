"""A step that changes NNX modules in place changes the caller's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def train_step(
    model: Model, optimizer: nnx.Optimizer, x: jax.Array
) -> tuple[jax.Array, Model]:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss, model


ADAM = optax.adam(1e-2, eps=1e-2)


def make_training() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


@pytest.fixture(scope="module")
def step() -> autopar.ParallelFunction:
    """One plan and one program for all tests."""
    return autopar.parallelize(train_step)


def values(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(tree, nnx.Not(nnx.RngKey)))
    return [np.asarray(leaf) for leaf in leaves]


X = jnp.sin(jnp.arange(128.0)).reshape(16, 8)


def test_all_changes_are_those_of_nnx_jit(step: Any) -> None:
    ours, theirs = make_training(), make_training()
    expected_step = nnx.jit(train_step)
    for _ in range(3):
        loss, model = step(*ours, X)
        expected, _ = expected_step(*theirs, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert model is ours[0]
    for mine, other in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    assert ours[1].step[...] == 3


def test_state_is_tied_and_donated_and_the_audit_holds(step: Any) -> None:
    compiled = step.lower(*make_training(), X).compile()
    compiled.audit().raise_if_wrong()
    role_by_path = {i.path: i.role for i in compiled.plan.sharding.inputs}
    assert role_by_path["model['linear']['kernel']"] == "state"
    assert role_by_path["optimizer['opt_state'][0]['mu']['linear']['kernel']"]
    assert role_by_path["x"] == "batch"
    training = make_training()
    first, _ = compiled(*training, X)
    second, _ = compiled(*training, X)
    assert first != second and training[1].step[...] == 2


def test_what_a_step_leaves_alone_is_neither_returned_nor_moved() -> None:
    model = Model(nnx.Rngs(0))
    model.eval()
    arrays = jax.tree.leaves(model)
    evaluate = autopar.parallelize(lambda model, x: model(x).sum())
    np.testing.assert_allclose(evaluate(model, X), model(X).sum(), rtol=1e-4)
    assert all(
        mine is before
        for mine, before in zip(jax.tree.leaves(model), arrays, strict=True)
    )
    roles = [i.role for i in evaluate.plan(model, X).sharding.inputs]
    assert "state" not in roles


def test_attributes_that_a_step_adds() -> None:
    @autopar.parallelize
    def grow(model: nnx.Dict, x: jax.Array) -> None:
        model.extra = nnx.Param(x * 2)
        model.name = "grown"

    model: Any = nnx.Dict(name="small")
    grow(model, jnp.ones(8))
    assert model.name == "grown" and (model.extra[...] == 2).all()


def test_a_module_that_is_given_twice_is_one() -> None:
    @autopar.parallelize
    def double(pair: nnx.List, alone: nnx.Linear) -> jax.Array:
        pair[0].kernel[...] *= 2
        return alone.kernel[...].sum() - pair[1].kernel[...].sum()

    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = np.asarray(linear.kernel[...])
    assert double(nnx.List([linear, linear]), linear) == 0
    np.testing.assert_allclose(linear.kernel[...], 2 * before)


def test_variables_and_modules_in_containers() -> None:
    @autopar.parallelize
    def count(tree: dict[str, Any], x: jax.Array) -> jax.Array:
        tree["count"][...] += 1
        tree["layers"][0].bias[...] += x.sum()
        return tree["count"][...]

    tree = {"count": nnx.Variable(jnp.zeros(())), "layers": []}
    tree["layers"].append(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    for number in (1, 2):
        assert count(tree, jnp.ones(8)) == number
    assert tree["count"][...] == 2
    assert (tree["layers"][0].bias[...] == 16).all()


@pytest.mark.slow
def test_a_step_of_split_state_is_a_step_of_any_tree() -> None:
    graphdef, state = nnx.split(make_training())

    def step(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, _ = train_step(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    after, loss = autopar.parallelize(step, donate_argnums=())(state, X)
    expected, expected_loss = jax.jit(step)(state, X)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(expected)


def test_a_plan_of_shapes(step: Any) -> None:
    shapes = nnx.eval_shape(make_training)
    plan = step.plan(*shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert plan is step.plan(*make_training(), X)
