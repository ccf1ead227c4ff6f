"""Arrays and constants of calls are told apart as ever, by trees that are known."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runtime.test_direct_calls import (
    assert_equal,
    layers_of,
    parallel,
    without_python,
)


class Scale(eqx.Module):
    """All but arrays are constants."""

    by: Any
    counts: Any


def test_what_is_a_constant_is_told_anew_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trees are equal; what are constants differs in value, type or place."""

    def scaled(scale: Scale, x: Any, more: Any) -> Any:
        by = scale.by(x) if callable(scale.by) else x * scale.by
        return by * scale.counts * more, scale

    made = parallel(scaled, donate_argnums=())
    x = counts = jnp.arange(8, dtype=np.int32)
    scales: list[Any] = [1, True, 1.0, 2, np.float32(3), jnp.sin, jnp.cos]
    kinds = [Scale(by, counts) for by in scales] + [Scale(counts, 2), Scale(2, counts)]
    calls = [(scale, x) for scale in kinds]
    calls += [(scale, 1.5) for scale in (kinds[0], kinds[5])]  # an array to the step
    for number in range(6):
        if number == 4:
            without_python(made, monkeypatch)
        for scale, more in calls:
            result, same = made(scale, x, more)
            expected, _ = scaled(scale, x, more)  # filter_jit takes True for 1
            assert_equal(result, expected)
            assert result.dtype == expected.dtype
            for ours, given in ((same.by, scale.by), (same.counts, scale.counts)):
                if isinstance(given, jax.Array | np.generic):
                    assert_equal(ours, given)
                else:
                    assert ours == given and type(ours) is type(given)


def test_a_leaf_that_cannot_be_hashed_is_none_of_the_constants() -> None:
    made = parallel(lambda layer, x: (x + layer.kernel, layer), donate_argnums=())
    layer, x = layers_of(jnp.tanh, 1)[0], np.ones((8, 8), np.float32)
    for activation in (jnp.tanh, set(), jnp.tanh, {1}):
        given = replace(layer, activation=activation)
        if callable(activation):
            assert made(given, x)[1].activation is activation
        else:
            with pytest.raises(TypeError, match=r"layer\.activation is "):
                made(given, x)
