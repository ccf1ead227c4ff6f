"""A parallelized function is called as `jax.jit` of it is, and returns the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.like_jit import (
    Tree,
    assert_like_jit,
    assert_same,
    make_batch,
    make_params,
    sgd_step,
)


class Moments(NamedTuple):
    mean: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    kernel: jax.Array
    bias: jax.Array | None


class TestTrees:
    def test_any_pytree_goes_in_and_comes_out(self) -> None:
        trees: list[Tree] = [
            {"b": jnp.ones(8), "a": jnp.zeros((8, 2))},
            [jnp.ones(8), (jnp.zeros(8), [jnp.ones(())])],
            Moments(jnp.ones(8), {"inner": jnp.ones((2, 8))}),
            Layer(jnp.ones((8, 8)), None),
            Layer(jnp.ones((8, 8)), jnp.ones(8)),
            {"layers": [Layer(jnp.ones((8, 8)), None)] * 2, "none": None, "empty": ()},
        ]
        assert_like_jit(
            lambda x, *trees: (*jax.tree.map(lambda a: a + x, trees), x), 1.0, *trees
        )

    def test_keyword_arguments(self) -> None:
        def fun(x: jax.Array, *, scale: jax.Array, **rest: Any) -> dict[str, Any]:
            return {"y": x * scale, **rest}

        x = jnp.arange(8.0)
        assert_like_jit(fun, x, scale=x + 1, extra={"z": x}, another=(x, None))

    def test_arguments_that_may_be_given_either_way(self) -> None:
        expected = jax.jit(sgd_step)(make_params(), make_batch())
        step = autopar.parallelize(jax.jit(sgd_step))  # jitted already
        assert_same(step(make_params(), batch=make_batch()), expected)
        assert_same(step(batch=make_batch(), params=make_params()), expected)

    @pytest.mark.parametrize(
        "fun",
        [
            lambda x: None,
            lambda x: (),
            lambda x: {
                "none inside": None,
                "constants": (1, 2.5, True, jnp.zeros(8), np.arange(3), jnp.float32(4)),
                "twice": (x, x + 1, x),
                "key": jax.random.key(3),
            },
        ],
        ids=["None", "empty", "all else"],
    )
    def test_what_is_returned(self, fun: Callable[..., Any]) -> None:
        assert_like_jit(fun, jnp.arange(8.0))

    def test_arguments_returned_unchanged(self) -> None:
        assert_like_jit(lambda x, y: (y, x), jnp.ones(8), jnp.zeros((16, 2), jnp.int32))


class TestLeaves:
    def test_numbers_and_numpy_keep_their_dtype_and_weak_type(self) -> None:
        leaves = [2, 2.5, True, 2j]
        leaves += [np.float32(2), np.float64(2), np.int8(2), np.arange(4)]
        assert_like_jit(
            lambda x, *leaves: [(x * n, n, n + 1, n * n) for n in leaves],
            *(jnp.ones((8, 4), jnp.bfloat16), *leaves),
        )

    def test_a_number_and_an_array_of_its_dtype_are_told_apart(self) -> None:
        x = jnp.ones(8, jnp.bfloat16)
        scale = autopar.parallelize(lambda x, n: x * n)
        assert scale(x, 2.0).dtype == jnp.bfloat16
        assert scale(x, np.float32(2)).dtype == jnp.float32
        assert scale(x, 3.0).dtype == jnp.bfloat16

    def test_a_counter_stays_the_number_it_came_in_as(self) -> None:
        step = autopar.parallelize(lambda state, x: ({"n": state["n"] + 1}, x * 2))
        state: Any = {"n": 0}
        for _ in range(3):
            state, _ = step(state, jnp.ones(8))
        assert state["n"] == 3 and state["n"].weak_type

    def test_keys_old_keys_and_many_keys_in_one_array(self) -> None:
        def drawn(key: jax.Array) -> tuple[jax.Array, ...]:
            next_key, key = jax.random.split(key)
            return next_key, jax.random.normal(key, (16, 8)), jax.random.bits(key, (8,))

        def fun(key: jax.Array, old: jax.Array, many: jax.Array) -> Any:
            each = jax.vmap(lambda key: jax.random.normal(key, (4,)))(many)
            return drawn(key), drawn(old), each

        keys = jax.random.split(jax.random.key(0), 8)
        assert_like_jit(fun, jax.random.key(1), jax.random.PRNGKey(1), keys)

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
        sharding = double(jnp.ones(8)).sharding
        assert isinstance(sharding, jax.NamedSharding)
        assert sharding.mesh.axis_names == ("data", "model")

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
