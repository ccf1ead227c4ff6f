"""State: created in its place, in pieces, and read beside the train step."""

import logging
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.audit.compiled_collectives import collectives_in_lowered
from autopar.pipelines.state_init import PlacedInit, init_programs
from autopar.planner.traced_init import trace_init
from autopar.state.placements import LeafPart

Tree = Any
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def init_params(key: jax.Array, width: int = 32) -> Tree:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (16, width)) * 0.3,
        "down": jax.random.truncated_normal(down, -2, 2, (width, 8)) * 0.3,
        "bias": jnp.zeros(8),
    }


def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(
        (jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"] - y) ** 2
    )


def train_step(
    params: Tree, opt_state: Tree, x: jax.Array, y: jax.Array
) -> tuple[Tree, Tree, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def init_both(key: jax.Array) -> tuple[Tree, Tree]:
    params = init_params(key)
    return params, OPTIMIZER.init(params)


def make_batch(size: int = 32) -> tuple[jax.Array, jax.Array]:
    x = jnp.sin(jnp.arange(size * 16.0)).reshape(size, 16)
    return x, jnp.ones((size, 8))


def abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def data(leaf: Any) -> np.ndarray:
    """Values to compare; those of a PRNG key are its data."""
    if isinstance(leaf, int):
        return np.asarray(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_equal(actual: Tree, expected: Tree) -> None:
    """Bit by bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(data(ours), data(theirs))


def assert_close(actual: Tree, expected: Tree) -> None:
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(data(ours), data(theirs), rtol=2e-4, atol=2e-5)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "autopar")
    return caplog


def with_text(log: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in log.messages if text in message]


KEY = jax.random.key(0)


class TestInit:
    def test_values_are_those_of_one_device_and_the_step_takes_them_where_they_lie(
        self, log: pytest.LogCaptureFixture
    ) -> None:
        step = autopar.parallelize(train_step)
        x, y = make_batch()
        expected = jax.jit(init_both)(KEY)
        for batch in ({"x": abstract(x), "y": y}, (x, y)):
            log.clear()
            state = step.init(init_both, KEY, batch=batch)
            assert_equal(state, expected)
        results = step(*state, x, y)
        assert len(with_text(log, "planned")) == 1
        assert not with_text(log, "moved")
        assert_close(results, jax.jit(train_step)(*expected, x, y))

    def test_a_state_that_is_a_tuple_is_told_from_several(self) -> None:
        def pair_step(state: Tree, batch: Tree, scale: float = 1.0) -> Tree:
            params, opt_state, loss = train_step(*state, *batch)
            return (params, opt_state), loss * scale

        def two_steps(params: Tree, opt_state: Tree, batch: Tree) -> Tree:
            return train_step(params, opt_state, *batch)

        for fun in (pair_step, two_steps):
            step = autopar.parallelize(fun)
            state = step.init(init_both, KEY, batch=make_batch())
            assert_equal(state, jax.jit(init_both)(KEY))

    def test_a_module_refuses_what_is_no_state_of_its_own(self) -> None:
        errors = pytest.importorskip("flax.errors", reason="flax is of `examples`")

        def two_steps(params: Tree, opt_state: Tree, batch: Tree) -> Tree:
            if type(params) is tuple:
                raise errors.FlaxError("the variables are of another module")
            return train_step(params, opt_state, *batch)

        step = autopar.parallelize(two_steps)
        state = step.init(init_both, KEY, batch=make_batch())
        assert_equal(state, jax.jit(init_both)(KEY))

    def test_an_error_that_says_nothing_of_arguments_is_let_through(self) -> None:
        class OutOfOrderError(Exception):
            pass

        def broken(state: Tree, batch: Tree, scale: float = 1.0) -> Tree:
            raise OutOfOrderError("the step is broken, whatever it is given")

        with pytest.raises(OutOfOrderError, match="is broken"):
            autopar.parallelize(broken).init(init_both, KEY, batch=make_batch())

    def test_every_device_makes_its_own_part_only(self) -> None:
        step = autopar.parallelize(
            lambda w, x: (w * 0.9, (x @ w).sum()), mesh="x:8", pins={"w": P("x")}
        )
        x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
        kernel = step.init(lambda key: jax.random.normal(key, (64, 32)), KEY, batch=x)
        assert {s.data.shape for s in kernel.addressable_shards} == {(8, 32)}

    @pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")])
    def test_nothing_is_sent_even_where_that_were_faster(self, spec: P) -> None:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        home = (LeafPart(NamedSharding(mesh, spec)),)
        init = trace_init(lambda key: jax.random.normal(key, (256, 256)), (KEY,), {})
        (made,) = init_programs(PlacedInit(init, (home,)), autopar.Cluster.local())
        assert not collectives_in_lowered(made.program.lower())

    def test_arguments_that_are_no_arrays_are_constants(self) -> None:
        def init(key: jax.Array, dims: str, *, activation: Any) -> Tree:
            params = init_params(key, width={"wide": 64}[dims])
            return activation(params["up"]), params["down"], params["bias"]

        def step(params: Tree, x: jax.Array) -> Tree:
            return jax.tree.map(lambda p: p * 0.9, params), (x @ params[0]).sum()

        planned = autopar.parallelize(step)
        x, _ = make_batch()
        state = planned.init(init, KEY, "wide", activation=jnp.tanh, batch=x)
        assert_equal(
            state, jax.jit(lambda k: init(k, "wide", activation=jnp.tanh))(KEY)
        )

    def test_closed_over_arrays_are_placed_in_shards(self) -> None:
        trained = np.ones((64, 32), np.float32)
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        home = (LeafPart(NamedSharding(mesh, P("x"))),)
        init = trace_init(lambda: jnp.asarray(trained) * 2, (), {})
        (made,) = init_programs(PlacedInit(init, (home,)), autopar.Cluster.local())
        assert made.program.shardings == (home[0].sharding,)
        step = autopar.parallelize(lambda w, x: (w * 0.9, (x @ w).sum()), mesh="x:8")
        x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
        kernel = step.init(lambda: jnp.asarray(trained) * 2, batch=x)
        np.testing.assert_array_equal(kernel, trained * 2)

    def test_weak_types_stay_so_that_the_step_is_planned_once(
        self, log: pytest.LogCaptureFixture
    ) -> None:
        model = flax.linen.Dense(8)
        x, y = make_batch()

        def init(key: jax.Array) -> TrainState:
            params = model.init(key, jnp.ones((1, 16)))
            return TrainState.create(
                apply_fn=model.apply, params=params, tx=optax.sgd(1e-2)
            )

        def step(state: TrainState, batch: Tree) -> tuple[TrainState, jax.Array]:
            def loss(params: Tree) -> jax.Array:
                return jnp.mean((state.apply_fn(params, batch[0]) - batch[1]) ** 2)

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        planned = autopar.parallelize(step)
        state = planned.init(init, KEY, batch=(x, y))
        expected = jax.jit(init)(KEY)
        assert_close(state, expected)
        assert state.step.weak_type
        state, loss = planned(state, (x, y))
        assert len(with_text(log, "planned")) == 1
        np.testing.assert_allclose(loss, jax.jit(step)(expected, (x, y))[1], rtol=1e-5)

    def test_an_nnx_model_and_its_optimizer(self) -> None:
        class Model(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.up = nnx.Linear(16, 32, rngs=rngs)
                self.down = nnx.Linear(32, 8, rngs=rngs)
                self.also_up = self.up.kernel  # one variable in two places

            def __call__(self, x: jax.Array) -> jax.Array:
                return self.down(jnp.tanh(self.up(x)))

        def init(key: jax.Array) -> tuple[Model, nnx.Optimizer]:
            model = Model(nnx.Rngs(key))
            return model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

        def step(model: Model, optimizer: nnx.Optimizer, x: Any, y: Any) -> jax.Array:
            def loss(model: Model) -> jax.Array:
                return jnp.mean((model(x) - y) ** 2)

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        planned = autopar.parallelize(step)
        model, optimizer = planned.init(init, KEY, batch=make_batch())
        assert model.also_up is model.up.kernel
        plain, plain_optimizer = nnx.jit(init)(KEY)
        np.testing.assert_allclose(model.up.kernel[...], plain.up.kernel[...])
        for _ in range(2):
            loss = planned(model, optimizer, *make_batch())
            expected = nnx.jit(step)(plain, plain_optimizer, *make_batch())
            np.testing.assert_allclose(loss, expected, rtol=1e-5)

    def test_an_equinox_module(self) -> None:
        def init(key: jax.Array) -> equinox.nn.Linear:
            return equinox.nn.Linear(16, 8, key=key)

        def step(model: Any, batch: Tree) -> tuple[Any, jax.Array]:
            def loss(model: Any) -> jax.Array:
                return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

            value, grads = equinox.filter_value_and_grad(loss)(model)
            updates = jax.tree.map(lambda g: -0.1 * g, grads)
            return equinox.apply_updates(model, updates), value

        planned = autopar.parallelize(step)
        model = planned.init(init, KEY, batch=make_batch())
        assert equinox.tree_equal(model, equinox.filter_jit(init)(KEY), rtol=1e-6)
        assert jnp.isfinite(planned(model, make_batch())[1])

    def test_shapes_and_shardings_without_arrays(self) -> None:
        step = autopar.parallelize(train_step)
        spec = step.abstract_state(init_both, KEY, batch=make_batch())
        state = step.init(init_both, KEY, batch=make_batch())
        assert jax.tree.structure(spec) == jax.tree.structure(state)
        for kind, leaf in zip(
            jax.tree.leaves(spec), jax.tree.leaves(state), strict=True
        ):
            assert isinstance(kind, jax.ShapeDtypeStruct)
            assert (kind.shape, kind.dtype) == (leaf.shape, leaf.dtype)
            assert leaf.sharding.is_equivalent_to(kind.sharding, leaf.ndim)
        assert step.plan(*spec, *make_batch()) is step.plan(*state, *make_batch())


class TestInitRefuses:
    def test_a_batch_that_is_missing(self) -> None:
        step: Any = autopar.parallelize(train_step)
        with pytest.raises(TypeError, match="'batch'"):
            step.init(init_both, KEY)

    def test_arguments_that_the_step_does_not_take(self) -> None:
        step = autopar.parallelize(train_step)
        with pytest.raises(TypeError, match=r"cannot be called with one state or 2"):
            step.init(init_both, KEY, batch=(1.0, 2.0, 3.0, 4.0))

    def test_state_that_comes_with_the_batch(self) -> None:
        step = autopar.parallelize(train_step)
        params, opt_state = init_both(KEY)
        with pytest.raises(ValueError, match=r"returned params, and opt_state\[0\]"):
            step.init(init_params, KEY, batch=(opt_state, *make_batch()))

    def test_a_state_that_the_step_fails_on(self) -> None:
        step = autopar.parallelize(train_step)
        with pytest.raises(TypeError):
            step.init(
                lambda key: ({"up": jnp.ones((4, 3))}, ()), KEY, batch=make_batch()
            )

    def test_shapes_in_place_of_values(self) -> None:
        step = autopar.parallelize(train_step)
        with pytest.raises(TypeError, match="runs on arrays, but got a jax.Shape"):
            step.init(init_both, abstract(KEY), batch=make_batch())
