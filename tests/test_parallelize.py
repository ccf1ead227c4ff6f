"""A parallelized function is called as `jax.jit` of it is, and returns the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

Tree = Any


class Moments(NamedTuple):
    mean: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    kernel: jax.Array
    bias: jax.Array | None


def sgd_step(params: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
    """One step of least squares; `params` is `{"w": [16, 8]}`."""

    def loss(params: Tree) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def make_params() -> dict[str, jax.Array]:
    return {"w": jnp.arange(128.0).reshape(16, 8) / 100}


def make_batch(size: int = 32) -> dict[str, jax.Array]:
    return {
        "x": jnp.sin(jnp.arange(size * 16.0)).reshape(size, 16),
        "y": jnp.ones((size, 8)),
    }


def assert_same(actual: Tree, expected: Tree) -> None:
    """Equal trees, shapes, dtypes, weak types and, up to rounding, values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for ours, theirs in leaves:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert is_weak(ours) == is_weak(theirs)
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(
            np.asarray(ours, np.complex64), np.asarray(theirs, np.complex64), rtol=1e-5
        )


def is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)


def assert_like_jit(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    expected = jax.jit(fun)(*args, **kwargs)
    assert_same(autopar.parallelize(fun, donate_argnums=())(*args, **kwargs), expected)


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of the functions that JAX traces or compiles meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event.startswith("/jax/core/compile"):
            seen.append(f"{event} {details.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class TestTrees:
    @pytest.mark.parametrize(
        "tree",
        [
            {"b": jnp.ones(8), "a": jnp.zeros((8, 2))},
            [jnp.ones(8), (jnp.zeros(8), [jnp.ones(())])],
            Moments(jnp.ones(8), {"inner": jnp.ones((2, 8))}),
            Layer(jnp.ones((8, 8)), None),
            Layer(jnp.ones((8, 8)), jnp.ones(8)),
            {"layers": [Layer(jnp.ones((8, 8)), None)] * 2, "none": None, "empty": ()},
        ],
        ids=lambda tree: str(jax.tree.structure(tree)),
    )
    def test_any_pytree_goes_in_and_comes_out(self, tree: Tree) -> None:
        assert_like_jit(lambda t, x: (jax.tree.map(lambda a: a + x, t), x), tree, 1.0)

    def test_keyword_arguments(self) -> None:
        def fun(x: jax.Array, *, scale: jax.Array, **rest: Any) -> dict[str, Any]:
            return {"y": x * scale, **rest}

        x = jnp.arange(8.0)
        assert_like_jit(fun, x, scale=x + 1, extra={"z": x}, another=(x, None))

    def test_arguments_that_may_be_given_either_way(self) -> None:
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        step = autopar.parallelize(sgd_step)
        assert_same(step(make_params(), batch=make_batch()), expected)
        assert_same(step(batch=make_batch(), params=make_params()), expected)

    @pytest.mark.parametrize(
        "fun",
        [
            lambda x: None,
            lambda x: (),
            lambda x: {"none": None, "x": x + 1},
            lambda x: (1, 2.5, True, jnp.zeros(8), np.arange(3), jnp.float32(4)),
            lambda x: (x, x + 1, x),
            lambda x: jax.random.key(3),
        ],
        ids=["None", "empty", "None inside", "constants", "twice", "constant key"],
    )
    def test_what_is_returned(self, fun: Callable[..., Any]) -> None:
        assert_like_jit(fun, jnp.arange(8.0))

    def test_arguments_returned_unchanged(self) -> None:
        assert_like_jit(lambda x, y: (y, x), jnp.ones(8), jnp.zeros((16, 2), jnp.int32))


class TestLeaves:
    @pytest.mark.parametrize(
        "leaf",
        [2, 2.5, True, 2j, np.float32(2), np.float64(2), np.int8(2), np.arange(4)],
        ids=lambda leaf: f"{type(leaf).__name__} {leaf}",
    )
    def test_numbers_and_numpy_keep_their_dtype_and_weak_type(self, leaf: Any) -> None:
        assert_like_jit(
            lambda x, n: (x * n, n, n + 1, n * n), jnp.ones((8, 4), jnp.bfloat16), leaf
        )

    def test_a_number_and_an_array_of_its_dtype_are_told_apart(self) -> None:
        x = jnp.ones(8, jnp.bfloat16)
        scale = autopar.parallelize(lambda x, n: x * n)
        assert scale(x, 2.0).dtype == jnp.bfloat16
        assert scale(x, np.float32(2)).dtype == jnp.float32
        assert scale(x, 3.0).dtype == jnp.bfloat16

    def test_a_counter_stays_the_number_it_came_in_as(self) -> None:
        step = autopar.parallelize(lambda state, x: ({"n": state["n"] + 1}, x * 2))
        state = {"n": 0}
        for _ in range(3):
            state, _ = step(state, jnp.ones(8))
        assert state["n"] == 3 and state["n"].weak_type

    @pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
    def test_keys(self, make_key: Callable[[int], jax.Array]) -> None:
        def fun(key: jax.Array) -> tuple[jax.Array, ...]:
            next_key, key = jax.random.split(key)
            return next_key, jax.random.normal(key, (16, 8)), jax.random.bits(key, (8,))

        assert_like_jit(fun, make_key(1))

    def test_many_keys_in_one_array(self) -> None:
        keys = jax.random.split(jax.random.key(0), 8)
        assert_like_jit(jax.vmap(lambda key: jax.random.normal(key, (4,))), keys)

    def test_numpy_state_is_left_as_it_was(self) -> None:
        step = autopar.parallelize(sgd_step)
        params = jax.tree.map(np.asarray, make_params())
        before = params["w"].copy()
        first = step(params, make_batch())
        np.testing.assert_array_equal(params["w"], before)
        assert_same(step(params, make_batch()), first)

    def test_arrays_on_other_devices_are_moved(self) -> None:
        device = jax.devices()[3]
        params, batch = jax.device_put((make_params(), make_batch()), device)
        step = autopar.parallelize(sgd_step, donate_argnums=())
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        assert_same(step(params, batch), expected)
        assert_same(step(params, batch), expected)

    def test_closed_over_arrays(self) -> None:
        table, bias = jnp.arange(32.0).reshape(4, 8), np.ones(8, np.float32)
        assert_like_jit(lambda x: x @ table.T + bias[:4], jnp.ones((16, 8)))

    def test_float64_where_it_is_enabled(self) -> None:
        step = autopar.parallelize(lambda x: x / 3)
        assert step(np.ones(8)).dtype == jnp.float32
        with jax.enable_x64(True):
            assert step(np.ones(8)).dtype == jnp.float64


class TestFunctions:
    def test_as_a_bare_decorator(self) -> None:
        @autopar.parallelize
        def double(x: jax.Array) -> jax.Array:
            """Twice."""
            return x * 2

        assert double(jnp.ones(8)).sum() == 16
        assert (double.__name__, double.__doc__) == ("double", "Twice.")

    def test_as_a_decorator_with_options(self) -> None:
        @autopar.parallelize(mesh="data:2;model:4", donate_argnums=())
        def double(x: jax.Array) -> jax.Array:
            return x * 2

        assert double(jnp.ones(8)).sum() == 16
        assert double.plan(jnp.ones(8)).sharding.mesh.axis_names == ("data", "model")

    def test_a_function_that_is_jitted_already(self) -> None:
        step = autopar.parallelize(jax.jit(sgd_step))
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        assert_same(step(make_params(), make_batch()), expected)

    def test_a_bound_method_and_a_partial(self) -> None:
        class Model:
            scale = 3.0

            def apply(self, x: jax.Array) -> jax.Array:
                return x * self.scale

        assert_like_jit(Model().apply, jnp.ones(8))
        assert_like_jit(jax.tree_util.Partial(jnp.multiply, 2.0), jnp.ones(8))

    def test_inside_other_transformations(self) -> None:
        square = autopar.parallelize(lambda x: x**2)
        x = jnp.arange(8.0)
        square(x)
        assert_same(jax.jit(square)(x), x**2)
        assert_same(jax.grad(lambda x: square(x).sum())(x), 2 * x)
        assert jax.eval_shape(square, x).shape == (8,)


class TestStaticArguments:
    @staticmethod
    def repeat(x: jax.Array, count: int, mode: str = "sum") -> jax.Array:
        tiled = jnp.tile(x, (count, 1))
        return tiled.sum(0) if mode == "sum" else tiled

    def test_by_position_keyword_and_default(self) -> None:
        repeat = autopar.parallelize(self.repeat, static_argnums=(1, 2))
        x = jnp.arange(8.0)
        assert_same(repeat(x, 3), x * 3)
        assert_same(repeat(x, count=3), x * 3)
        assert repeat(x, 3, "tile").shape == (3, 8)
        assert repeat(x, 3, mode="tile").shape == (3, 8)

    def test_counted_from_the_end(self) -> None:
        repeat = autopar.parallelize(self.repeat, static_argnums=(-2, -1))
        assert repeat(jnp.ones(8), 2, "tile").shape == (2, 8)

    def test_each_value_is_its_own_constant(self) -> None:
        power = autopar.parallelize(lambda n, x: x**n, static_argnums=0)
        x = jnp.arange(8.0)
        assert_same([power(2, x), power(3, x), power(2, x)], [x**2, x**3, x**2])

    def test_equal_values_of_two_types_are_two_constants(self) -> None:
        name = autopar.parallelize(
            lambda n, x: {type(n).__name__: x + 1}, static_argnums=0
        )
        x = jnp.ones(8)
        assert list(name(1, x)) == ["int"]
        assert list(name(True, x)) == ["bool"]

    def test_a_changed_shape_with_a_static_argument(self) -> None:
        repeat = autopar.parallelize(self.repeat, static_argnums=1)
        assert repeat(jnp.ones(8), 2).shape == (8,)
        assert repeat(jnp.ones(16), 2).shape == (16,)


class TestDonation:
    def donated(self, donate_argnums: Any) -> tuple[bool, bool]:
        """Whether a step that runs in place deletes its parameters and its batch."""
        step = autopar.parallelize(sgd_step, donate_argnums=donate_argnums)
        compiled = step.lower(make_params(), make_batch()).compile()
        shardings = compiled.lowered.program.shardings
        w, x, y = (
            jax.device_put(leaf, home)
            for leaf, home in zip(
                jax.tree.leaves((make_params(), make_batch())), shardings, strict=True
            )
        )
        step({"w": w}, {"x": x, "y": y})
        return w.is_deleted(), x.is_deleted()

    def test_state_is_donated_unless_told_otherwise(self) -> None:
        assert self.donated("auto") == (True, False)

    def test_nothing_is_donated_on_request(self) -> None:
        assert self.donated(()) == (False, False)

    def test_chosen_arguments_are_donated(self) -> None:
        assert self.donated(0) == (True, False)
        assert self.donated((-2,)) == (True, False)

    def test_the_same_array_in_two_places_of_the_state(self) -> None:
        step = autopar.parallelize(
            lambda p, x: ({"a": p["a"] + x.sum(), "b": p["b"] * 2}, x[0])
        )
        ones = jnp.ones((8, 8))
        state, _ = step({"a": ones, "b": ones}, jnp.ones(8))
        assert (state["a"][0, 0], state["b"][0, 0]) == (9, 2)
        in_place = state["a"]
        state, _ = step({"a": in_place, "b": in_place}, jnp.ones(8))
        assert (state["a"][0, 0], state["b"][0, 0]) == (17, 18)

    def test_the_same_array_as_state_and_batch(self) -> None:
        step = autopar.parallelize(lambda p, x: (p + x.sum(), x[0]))
        ones = jnp.ones((8, 8))
        first, _ = step(ones, ones)
        second, _ = step(first, first)
        assert (first.shape, second[0, 0]) == ((8, 8), 65 + 64 * 65)


class TestPlansAndCalls:
    def test_one_plan_for_each_batch_shape(self) -> None:
        step = autopar.parallelize(sgd_step, donate_argnums=())
        for size in (32, 64, 32):
            expected = jax.jit(sgd_step)(make_params(), make_batch(size))
            assert_same(step(make_params(), make_batch(size)), expected)
        plans = [step.plan(make_params(), make_batch(size)) for size in (32, 64, 32)]
        assert plans[0] is plans[2]
        assert plans[0] is not plans[1]

    def test_later_calls_neither_trace_nor_compile(self) -> None:
        step = autopar.parallelize(sgd_step)
        params, _ = step(make_params(), make_batch())
        fresh, batch = make_params(), make_batch()
        host = jax.tree.map(np.asarray, batch)
        with count_compilations() as compilations:
            params, _ = step(params, batch)
            params, _ = step(params, host)
            params, _ = step(fresh, batch)
        assert not compilations

    def test_shapes_seen_before_are_not_compiled_again(self) -> None:
        step = autopar.parallelize(sgd_step, donate_argnums=())
        params, small, large = make_params(), make_batch(32), make_batch(64)
        step(params, small)
        step(params, large)
        with count_compilations() as compilations:
            step(params, small)
            step(params, large)
        assert not compilations

    def test_lowering_and_calling_share_one_program(self) -> None:
        step = autopar.parallelize(sgd_step)
        params, batch = make_params(), make_batch()
        step.lower(params, batch).compile()
        with count_compilations() as compilations:
            step(params, batch)
        assert not compilations

    def test_the_function_is_traced_once(self) -> None:
        calls = []

        def fun(x: jax.Array) -> jax.Array:
            calls.append(x.shape)
            return x + 1

        step = autopar.parallelize(fun)
        step.plan(jnp.ones(8))
        step.lower(jnp.ones(8)).compile()
        step(step(jnp.ones(8)))
        assert calls == [(8,)]

    def test_a_plan_needs_shapes_only(self) -> None:
        step = autopar.parallelize(sgd_step)
        shapes = jax.eval_shape(lambda: (make_params(), make_batch()))
        assert step.plan(*shapes) is step.plan(make_params(), make_batch())

    def test_a_plan_for_a_cluster_that_is_not_there(self) -> None:
        step = autopar.parallelize(
            sgd_step, cluster=autopar.Cluster.preset("8x8xH100"), mesh="data:8;model:8"
        )
        shapes = jax.eval_shape(lambda: (make_params(), make_batch(1024)))
        plan = step.plan(*shapes)
        assert plan.sharding.mesh.size == 64
        assert plan.predicted.step_seconds > 0

    def test_a_lowered_step_has_both_programs(self) -> None:
        lowered = autopar.parallelize(sgd_step).lower(make_params(), make_batch())
        compiled = lowered.compile()
        assert "stablehlo" in lowered.as_text()
        assert "HloModule" in compiled.as_text()
        assert compiled.memory_analysis().argument_size_in_bytes > 0
        compiled.audit().raise_if_wrong()

    def test_a_compiled_step_runs(self) -> None:
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        step = autopar.parallelize(sgd_step)
        compiled = step.lower(make_params(), make_batch()).compile()
        assert_same(compiled(make_params(), make_batch()), expected)

    def test_a_saved_plan_runs_as_it_is(self, tmp_path: Path) -> None:
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        plan = autopar.parallelize(sgd_step, mesh="a:2;b:4").plan(
            make_params(), make_batch()
        )
        plan.save(tmp_path / "plan.json")
        loaded = autopar.Plan.load(tmp_path / "plan.json")
        step = autopar.parallelize(sgd_step, plan=loaded)
        assert step.plan(make_params(), make_batch()) == plan
        assert_same(step(make_params(), make_batch()), expected)

    def test_the_state_stays_where_the_plan_puts_it(self) -> None:
        step = autopar.parallelize(sgd_step, mesh="x:2;y:4")
        params, _ = step(make_params(), make_batch())
        sharding = params["w"].sharding
        params, _ = step(params, make_batch())
        assert params["w"].sharding == sharding
        assert sharding.mesh.devices.size == 8
