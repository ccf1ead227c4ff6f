"""What happens to a train step from day to day: other batches, threads, debugging."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.runtime.local import check_platform

Tree = Any


@dataclass(frozen=True)
class Device:
    platform: str


def loss_fn(params: Tree, batch: Tree) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def train_step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def eval_step(params: Tree, batch: Tree) -> jax.Array:
    return loss_fn(params, batch)


def make_params() -> Tree:
    up = jnp.cos(jnp.arange(256.0)).reshape(16, 16) / 4
    return {"up": up, "down": jnp.ones((16, 8)) / 16}


def make_batch(size: int = 32) -> Tree:
    x = jnp.sin(jnp.arange(size * 16.0)).reshape(size, 16)
    return {"x": x, "y": jnp.ones((size, 8))}


def assert_close(actual: Tree, expected: Tree) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What autopar logs."""
    caplog.set_level(logging.INFO, logger="autopar")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("autopar").addHandler(handler)
    yield seen
    logging.getLogger("autopar").removeHandler(handler)


def with_text(messages: list[str], text: str) -> list[str]:
    return [message for message in messages if text in message]


class TestTwoSteps:
    def test_an_evaluation_takes_the_parameters_where_they_lie(
        self, messages: list[str]
    ) -> None:
        train = autopar.parallelize(
            train_step, mesh="x:2;y:4", pins={"up": P(None, "y"), "down": P("y", "x")}
        )
        evaluate = autopar.parallelize(eval_step, mesh="x:2;y:4")
        params, batch = make_params(), make_batch()
        expected = loss_fn(jax.jit(train_step)(params, batch)[0], batch)
        params, _ = train(params, batch)
        assert_close(evaluate(params, batch), expected)
        compiled = evaluate.lower(params, batch).compile()
        compiled.audit().raise_if_wrong()
        up, down = (params[name].sharding for name in ("up", "down"))
        home_by_path = dict(
            zip(
                compiled.lowered.traced.input_paths,
                compiled.lowered.program.shardings,
                strict=True,
            )
        )
        assert home_by_path["params['up']"].is_equivalent_to(up, 2)
        assert home_by_path["params['down']"].is_equivalent_to(down, 2)
        assert not with_text(messages, "moved")
        train(params, batch)

    def test_pins_go_before_placements(self) -> None:
        x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh_of(x=8), P("x")))
        double = autopar.parallelize(lambda x: x * 2, pins={"x": P(None, "x")})
        (planned,) = double.plan(x).sharding.inputs
        assert planned.spec == (1,)
        assert_close(double(x), jnp.full((8, 8), 2.0))

    def test_arrays_that_lie_elsewhere_are_moved_and_reported_once(
        self, messages: list[str]
    ) -> None:
        elsewhere = NamedSharding(mesh_of(a=4, b=2), P("b", "a"))
        params, batch = jax.device_put((make_params(), make_batch()), elsewhere)
        step = autopar.parallelize(train_step, mesh="x:8", donate_argnums=())
        expected = jax.jit(train_step)(make_params(), make_batch())
        for _ in range(3):
            assert_close(step(params, batch), expected)
        (message,) = with_text(messages, "moved")
        assert message.startswith("train_step: moved 4 arrays of 4608 bytes")

    def test_state_comes_back_in_place(self, messages: list[str]) -> None:
        elsewhere = NamedSharding(mesh_of(a=4, b=2), P("b", "a"))
        params = jax.device_put(make_params(), elsewhere)
        step = autopar.parallelize(train_step)
        for _ in range(3):
            params, _ = step(params, make_batch())
        assert len(with_text(messages, "moved 2 arrays")) == 1

    def test_state_that_is_edited_between_steps(self) -> None:
        step = autopar.parallelize(train_step)
        params, expected = make_params(), make_params()
        for scale in (0.5, 2.0):
            params, _ = step(params, make_batch())
            expected, _ = jax.jit(train_step)(expected, make_batch())
            params["up"] = params["up"].at[0].multiply(scale)
            expected["up"] = expected["up"].at[0].multiply(scale)
            params["down"] = np.asarray(params["down"]) * scale
            expected["down"] = np.asarray(expected["down"]) * scale
        expected, _ = jax.jit(train_step)(expected, make_batch())
        assert_close(step(params, make_batch())[0], expected)

    def test_donation_by_hand(self) -> None:
        step = autopar.parallelize(train_step, donate_argnums=0)
        params, _ = step(make_params(), make_batch())
        kept = jax.tree.map(jnp.copy, params)
        step(params, make_batch())
        assert params["up"].is_deleted() and not kept["up"].is_deleted()
        with pytest.raises(RuntimeError, match=r"params\['down'\].*donate_argnums"):
            step(params, make_batch())
        step(kept, make_batch())


class TestManyShapes:
    def test_each_batch_size_is_planned_once_and_more_than_eight_are_warned_of_once(
        self, messages: list[str]
    ) -> None:
        calls = []

        def total(x: jax.Array) -> jax.Array:
            calls.append(x.shape)
            return x.sum()

        step = autopar.parallelize(total)
        for _ in range(2):
            for size in range(8, 18):
                assert step(jnp.ones(size)) == size
                if len(calls) == 8:
                    assert not with_text(messages, "few kinds")
        assert len(calls) == 10
        (message,) = with_text(messages, "should be called with few kinds")
        assert "more than 8: what changed is x, which was float32[8]" in message

    def test_the_last_batch_may_be_smaller(self) -> None:
        step = autopar.parallelize(train_step, donate_argnums=())
        for size in (32, 7, 32):
            expected = jax.jit(train_step)(make_params(), make_batch(size))
            assert_close(step(make_params(), make_batch(size)), expected)


class TestInsideAndOutside:
    def test_one_inside_another_is_a_plain_function(self) -> None:
        inner = autopar.parallelize(train_step, mesh="a:2;b:4")

        def two_steps(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
            params, _ = inner(params, batch)
            return inner(params, batch)

        outer = autopar.parallelize(two_steps, mesh="x:8")
        compiled = outer.lower(make_params(), make_batch()).compile()
        compiled.audit().raise_if_wrong()
        assert compiled.plan.predicted.split_flops_fraction == 1
        expected = jax.jit(train_step)(make_params(), make_batch())[0]
        expected = jax.jit(train_step)(expected, make_batch())
        assert_close(outer(make_params(), make_batch()), expected)

    def test_its_gradient_in_another(self) -> None:
        loss = autopar.parallelize(loss_fn)

        @autopar.parallelize
        def step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        expected = jax.jit(train_step)(make_params(), make_batch())
        assert_close(step(make_params(), make_batch()), expected)

    def test_vmap(self) -> None:
        batches = jax.tree.map(lambda x: jnp.stack([x, x / 2]), make_batch())
        step = autopar.parallelize(eval_step)
        actual = jax.vmap(step, in_axes=(None, 0))(make_params(), batches)
        by_jax = jax.jit(jax.vmap(eval_step, in_axes=(None, 0)))
        expected = by_jax(make_params(), batches)
        assert_close(actual, expected)

    @pytest.mark.parametrize("is_jitted", [False, True])
    def test_gradients(self, is_jitted: bool) -> None:
        gradient = jax.grad(autopar.parallelize(eval_step))
        gradient = jax.jit(gradient) if is_jitted else gradient
        expected = jax.jit(jax.grad(eval_step))(make_params(), make_batch())
        assert_close(gradient(make_params(), make_batch()), expected)

    def test_a_loop_of_steps(self) -> None:
        def run(step: Any) -> Tree:
            return jax.jit(
                lambda params: jax.lax.fori_loop(
                    0, 3, lambda _, params: step(params, make_batch())[0], params
                )
            )(make_params())

        assert_close(run(autopar.parallelize(train_step)), run(train_step))


class TestThreads:
    def test_two_threads_share_one_plan(self) -> None:
        calls = []

        def counted(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
            calls.append(1)
            return train_step(params, batch)

        step = autopar.parallelize(counted)
        barrier, results = threading.Barrier(2), {}

        def train(name: int) -> None:
            params, loss = make_params(), None
            barrier.wait()
            for _ in range(20):
                params, loss = step(params, make_batch())
                jax.block_until_ready(params)
            results[name] = params, loss

        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        params, loss = make_params(), None
        for _ in range(20):
            params, loss = jax.jit(train_step)(params, make_batch())
        assert len(calls) == 1
        assert_close(results[0], (params, loss))
        assert_close(results[1], (params, loss))


class TestDebugging:
    def test_without_jit_the_function_runs_as_it_is(self) -> None:
        seen = []

        def fun(x: jax.Array) -> jax.Array:
            seen.append(float(x.sum()))
            return x * 2

        step = autopar.parallelize(fun)
        with jax.disable_jit():
            assert_close(step(jnp.ones(8)), jnp.full(8, 2.0))
        assert seen == [8.0]

    @pytest.mark.filterwarnings("ignore:invalid value")
    def test_nans_are_found_where_they_come_up(self) -> None:
        step = autopar.parallelize(lambda state, x: (state + jnp.log(x), x.sum()))
        state, x = jnp.ones((8, 8)), jnp.ones((8, 8))
        with jax.debug_nans(True):
            state, total = step(state, x)
            assert (state[0, 0], total) == (1, 64)
            with pytest.raises(FloatingPointError, match="nan.*encountered in log"):
                step(state, -x)
            assert_close(step(state, x)[0], jnp.ones((8, 8)))

    def test_float64(self) -> None:
        step = autopar.parallelize(train_step, donate_argnums=())
        with jax.enable_x64(True):
            params = jax.tree.map(lambda p: np.asarray(p, np.float64), make_params())
            new, loss = step(params, make_batch())
            assert new["up"].dtype == loss.dtype == np.float64
            expected, _ = jax.jit(train_step)(params, make_batch())
            np.testing.assert_allclose(new["up"], expected["up"], rtol=1e-12)
        assert step(make_params(), make_batch())[1].dtype == np.float32

    def test_arrays_of_another_platform_are_refused(self) -> None:
        cpu, gpu = Device("cpu"), Device("gpu")
        check_platform("x", {cpu}, {cpu})
        with pytest.raises(ValueError, match="mesh, which is 'gpu', but x .* 'cpu'"):
            check_platform("x", {cpu}, {gpu})
