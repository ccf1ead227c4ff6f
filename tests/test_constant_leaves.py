"""Leaves that are no arrays are constants inside modules, and mistakes elsewhere."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.constant_leaves import (
    ResultTree,
    hold_constants,
    release_constants,
)


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A class that is registered with JAX; no field is named as static."""

    kernel: Any
    activation: Any
    rate: Any = 2.0


class Module(eqx.Module):
    kernel: Any
    extras: list[Any]


def apply(layer: Layer, x: jax.Array) -> tuple[Layer, jax.Array]:
    return layer, layer.activation(x @ layer.kernel) * layer.rate


def test_functions_and_strings_of_a_registered_class_are_held() -> None:
    layer = Layer(jnp.ones((8, 8)), {"name": "relu", "of": [jax.nn.relu, None]})
    held = hold_constants((layer, {"x": 1}))
    assert len(jax.tree.leaves(held)) == 3
    assert release_constants(held) == (layer, {"x": 1})


def test_numbers_are_held_in_equinox_modules_only() -> None:
    extras = [1, True, 2.5, np.ones(2), np.float32(3), "name"]
    held = hold_constants(Module(jnp.ones(8), extras))
    assert [leaf.shape for leaf in jax.tree.leaves(held)] == [(8,), (2,), ()]
    held = hold_constants(Layer(jnp.ones(8), jax.nn.relu, extras))
    assert len(jax.tree.leaves(held)) == 6


def test_equal_constants_of_two_types_make_two_trees() -> None:
    one, true = (jax.tree.structure(hold_constants(Module(0, [x]))) for x in (1, True))
    assert one != true


def test_a_result_tree_releases_what_it_holds() -> None:
    held = hold_constants([Module(jnp.ones(8), ["a", jnp.zeros(2), "b"]), 3])
    tree = ResultTree.of(jax.tree.structure(held))
    assert tree.unflatten("xyz") == [Module("x", ["a", "y", "b"]), "z"]


def test_a_layer_with_a_function_runs_and_comes_back() -> None:
    step = autopar.parallelize(apply)
    layer, x = Layer(jnp.ones((8, 8)), jax.nn.relu), jnp.arange(64.0).reshape(8, 8)
    expected = jax.nn.relu(x @ jnp.ones((8, 8))) * 2
    for _ in range(2):
        layer, y = step(layer, x)
        assert layer.activation is jax.nn.relu
        np.testing.assert_allclose(y, expected)


def test_another_constant_is_another_plan() -> None:
    step = autopar.parallelize(apply, donate_argnums=())
    kernel, x = jnp.ones((8, 8)), -jnp.ones((8, 8))
    for activation, expected in ((jax.nn.relu, 0), (jnp.negative, 16), (abs, 16)):
        for _ in range(2):
            _, y = step(Layer(kernel, activation), x)
            assert (y == expected).all()


def test_a_compiled_step_takes_modules() -> None:
    layer, x = Layer(jnp.ones((8, 8)), jax.nn.relu), jnp.ones((8, 8))
    compiled = autopar.parallelize(apply).lower(layer, x).compile()
    layer, y = compiled(layer, x)
    assert (y == 16).all() and layer.activation is jax.nn.relu


def test_a_plan_of_shapes() -> None:
    shapes = jax.eval_shape(lambda: (jnp.ones((8, 8)), jnp.ones((8, 8))))
    step = autopar.parallelize(apply)
    plan = step.plan(Layer(shapes[0], jax.nn.relu), shapes[1])
    assert plan is step.plan(Layer(jnp.ones((8, 8)), jax.nn.relu), jnp.ones((8, 8)))


@pytest.mark.parametrize(
    "stray", [{"w": "name"}, ["name"], ("name",)], ids=["dict", "list", "tuple"]
)
def test_a_string_in_a_container_is_a_mistake(stray: Any) -> None:
    step = autopar.parallelize(lambda tree, x: x)
    with pytest.raises(TypeError, match=r"but tree\[.*\] is 'name' of type str"):
        step(stray, jnp.ones(8))


def test_what_cannot_be_hashed_is_a_mistake_in_a_module_too() -> None:
    step = autopar.parallelize(apply)
    layer = Layer(jnp.ones((8, 8)), bytearray(b"name"))
    with pytest.raises(TypeError, match="but layer.activation is bytearray"):
        step(layer, jnp.ones((8, 8)))


def test_all_but_arrays_are_constants_to_a_filter_jitted_function() -> None:
    @autopar.parallelize
    @eqx.filter_jit
    def repeat(x: jax.Array, options: dict[str, Any]) -> tuple[jax.Array, Any]:
        return jnp.tile(x, options["times"]), options["name"]

    y, name = repeat(jnp.ones(8), {"times": 2, "name": "twice"})
    assert (y.shape, name) == ((16,), "twice")
    y, name = repeat(jnp.ones(8), {"times": 3, "name": "thrice"})
    assert (y.shape, name) == ((24,), "thrice")
