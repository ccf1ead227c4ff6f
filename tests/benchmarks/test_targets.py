"""Steps of one's own as benchmarks run them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from benchmarks.ray_step import _fed
from benchmarks.targets import OwnStep, find_target


def nothing() -> None:
    """A step that is never run."""


def test_examples_without_values_get_some() -> None:
    shapes = (
        jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.bool_),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (2, 3))),
    )
    made = OwnStep("own", nothing, shapes).arguments()
    for value, shape in zip(made, shapes, strict=True):
        assert (value.shape, value.dtype) == (shape.shape, shape.dtype)
    floats, integers, *_ = made
    assert jnp.all((floats >= 0) & (floats < 1)) and jnp.any(floats > 0)
    assert not jnp.any(integers)


def test_examples_with_values_outlive_a_step_that_takes_them() -> None:
    kept = {"w": jnp.arange(4.0), "key": jax.random.key(1), "rate": 0.1}
    target = OwnStep("own", nothing, (kept, np.ones(3)))
    given, _ = target.arguments()
    given["w"].delete()
    again, array = target.arguments()
    assert again["w"].tolist() == [0, 1, 2, 3] and again["rate"] == 0.1
    assert isinstance(array, np.ndarray)
    spec, shape = target.abstract()
    assert spec["w"] == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert shape == jax.ShapeDtypeStruct((3,), array.dtype)


def test_models_of_the_zoo_take_settings() -> None:
    found = find_target("mlp", None, {"num_layers": 2})
    assert len(found.arguments()[0].params["layers"]) == 2
    with pytest.raises(ValueError, match="did you mean 'num_layers'"):
        find_target("mlp", None, {"num_layer": 2})


def test_a_parallelized_step_is_taken_as_it_was() -> None:
    found = find_target(f"{__name__}:decorated", f"{__name__}:examples", {})
    assert found.step is plain


def plain(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return params + 1, x


decorated = autopar.parallelize(plain)


def examples() -> tuple[jax.Array, jax.Array]:
    return jnp.ones(3), jnp.ones(4)


def test_results_are_the_arguments_of_the_next_step_where_they_fit() -> None:
    arguments = {"w": jnp.ones(3)}, (jnp.zeros(3),), jnp.ones((8, 3))

    def results(params: jax.Array, moments: jax.Array, x: jax.Array):
        return jnp.sum(x), params, moments

    assert _fed(arguments, jax.eval_shape(results, *arguments)) == {0: 1, 1: 2}
    assert _fed(arguments, jax.eval_shape(lambda *_: 0.0, *arguments)) == {}
