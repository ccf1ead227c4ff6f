"""Calls of a known kind are made in C++; all that needs Python still gets it."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.runtime.local import LocalExecutable
from tests.marks import slow

BATCH = np.arange(64, dtype=np.float32).reshape(16, 4)


def step(state: dict[str, Any], batch: Any, scale: int = 1) -> tuple[Any, Any]:
    new = {name: value + scale * batch.mean() for name, value in state.items()}
    return new, batch.sum()


def a_state() -> dict[str, Any]:
    return {"a": np.zeros((64, 8), np.float32), "b": np.ones(64, np.float32)}


def parallel(fun: Callable[..., Any] = step, **options: Any) -> Any:
    return autopar.parallelize(fun, mesh="x:8", **options)


def without_python(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on only C++ makes calls."""

    def refuse(*_: Any) -> None:
        raise AssertionError("this call was made in Python")

    monkeypatch.setattr(LocalExecutable, "__call__", refuse)
    monkeypatch.setattr(made._direct, "_ready", refuse)


def assert_equal(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda fun, state: fun(state, BATCH),
        lambda fun, state: fun(state, BATCH, 2),
        lambda fun, state: fun(state, batch=BATCH, scale=3),
    ],
    ids=["positions", "static", "keywords"],
)
def test_the_third_call_is_made_in_cpp(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = parallel(static_argnums=2), jax.jit(step, static_argnums=2)
    state = expected = a_state()
    for number in range(5):
        if number == 3:
            without_python(made, monkeypatch)
        (state, result), (expected, other) = call(made, state), call(plain, expected)
        assert_equal((state, result), (expected, other))
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(state)} == {8}
    assert all(leaf.committed for leaf in jax.tree.leaves(state))


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A module whose function is a leaf."""

    kernel: Any
    activation: Any
    key: Any


def act(layers: list[Layer], x: jax.Array) -> tuple[list[Layer], jax.Array]:
    changed = []
    for layer in layers:
        key, now = jax.random.split(layer.key)
        x = layer.activation(x @ layer.kernel) + jax.random.normal(now, x.shape)
        changed.append(Layer(layer.kernel + x.mean(), layer.activation, key))
    return changed, x


def test_calls_with_constants_among_the_leaves_are_made_in_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Constants come back in the result, beside keys; others are other calls."""
    made = parallel(act)
    plain = jax.jit(act_of, static_argnames="f")
    x = np.ones((16, 8), np.float32)
    kinds = [(jax.nn.relu, 2), (jnp.tanh, 2), (jnp.tanh, 1)]
    state = [layers_of(*kind) for kind in kinds]
    expected = [layers_of(*kind) for kind in kinds]
    for number in range(6):
        if number == 4:
            without_python(made, monkeypatch)
        for which, (activation, _) in enumerate(kinds):
            state[which], y = made(state[which], x)
            kernels = [layer.kernel for layer in expected[which]]
            keys = [layer.key for layer in expected[which]]
            kernels, keys, other = plain(kernels, keys, activation, x)
            expected[which] = [
                Layer(kernel, activation, key)
                for kernel, key in zip(kernels, keys, strict=True)
            ]
            np.testing.assert_allclose(y, other, rtol=1e-4, atol=1e-5)
            for ours, theirs in zip(state[which], expected[which], strict=True):
                assert ours.activation is activation
                assert ours.key == theirs.key
                np.testing.assert_allclose(ours.kernel, theirs.kernel, rtol=1e-4)


def layers_of(activation: Callable[..., Any], count: int) -> list[Layer]:
    kernel = np.eye(8, dtype=np.float32)
    return [Layer(kernel, activation, jax.random.key(i)) for i in range(count)]


def act_of(kernels: Any, keys: Any, f: Callable[..., Any], x: Any) -> Any:
    layers = [Layer(kernel, f, key) for kernel, key in zip(kernels, keys, strict=True)]
    changed, x = act(layers, x)
    return [each.kernel for each in changed], [each.key for each in changed], x


def test_a_deleted_or_repeated_buffer_of_a_module_is_seen_before() -> None:
    def add(layer: Layer, x: Any) -> tuple[Layer, Any]:
        return replace(layer, kernel=layer.kernel + x), x.sum()

    made, kept = parallel(add), parallel(add)
    x = np.ones(8, np.float32)
    layers = [Layer(np.zeros(8, np.float32), jax.nn.relu, jax.random.key(0))]
    for _ in range(4):
        layers.append(made(layers[-1], x)[0])
    with pytest.raises(RuntimeError, match="but layer.kernel, layer.key was given"):
        made(layers[2], x)
    assert_equal(made(layers[-1], x)[0].kernel, np.full(8, 5.0))
    layer = layers_of(jax.nn.relu, 1)[0]
    for number in range(1, 4):
        layer = kept(layer, layer.kernel)[0]
        assert_equal(layer.kernel, np.eye(8) * 2.0**number)


def test_calls_with_modules_of_nnx_are_made_in_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(module: Any, others: dict[str, Any], x: Any) -> Any:
        module.kernel[...] = module.kernel[...] + x.mean()
        others["module"].kernel[...] = others["module"].kernel[...] - others["by"]
        return x * module.kernel[...].sum()

    module, other = (nnx.Linear(8, 16, rngs=nnx.Rngs(0)) for _ in range(2))
    start, x = np.asarray(module.kernel[...]), np.ones(8, np.float32)
    made = parallel(count)
    for number in range(1, 6):
        if number == 4:
            without_python(made, monkeypatch)
        y = made(module, {"module": other, "by": np.float32(2)}, x)
        np.testing.assert_allclose(module.kernel[...], start + number, rtol=1e-5)
        np.testing.assert_allclose(other.kernel[...], start - 2 * number, rtol=1e-5)
        assert_equal(y, np.full(8, np.sum(start + number)))


def with_a_key() -> Callable[..., Any]:
    key = jax.random.key(3)
    return lambda state, batch: step(state, batch * jax.random.uniform(key, (4,)))


def with_a_table() -> Callable[..., Any]:
    table = jnp.linspace(0.5, 2.0, 4)
    return lambda state, batch: step(state, batch * table)


@pytest.mark.parametrize(
    ("make", "place", "given"),
    [
        (with_a_table, 0, np.asarray),
        (with_a_key, 0, np.asarray),
        (lambda: lambda batch, state: step(state, batch), 1, np.asarray),
        (lambda: step, 0, jnp.asarray),
    ],
    ids=[
        "closed-over array",
        "closed-over key",
        "kept before donated",
        "array that lies nowhere",
    ],
)
def test_other_calls_that_need_no_python_are_made_in_cpp(
    make: Callable[[], Callable[..., Any]],
    place: int,
    given: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`place` is the state's among the arguments."""
    fun = make()
    made, plain = parallel(fun, donate_argnums=place), jax.jit(fun)
    state = expected = a_state()
    for number in range(5):
        if number == 3:
            without_python(made, monkeypatch)
        ours, theirs, old = [given(BATCH)], [given(BATCH)], state
        ours.insert(place, state)
        theirs.insert(place, expected)
        (state, result), (expected, other) = made(*ours), plain(*theirs)
        assert_equal((state, result), (expected, other))
        assert number == 0 or old["a"].is_deleted()
    (executable,) = made._running()
    closed_over = make in (with_a_table, with_a_key)
    assert len(executable.program.constants) == closed_over


def test_a_donated_buffer_that_is_kept_too_is_copied() -> None:
    made = parallel(lambda x, kept: (x + kept, kept.sum()), donate_argnums=0)
    x = made(np.ones(8, np.float32), np.ones(8, np.float32))[0]
    for number in range(2, 5):
        assert_equal(made(x, x), (np.full(8, 2.0**number), 8 * 2.0 ** (number - 1)))
        assert not x.is_deleted()
        x = made(x, jnp.copy(x))[0]


def test_each_kind_of_arguments_is_known_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes, statics that are equal, and keys."""

    def draw(key: Any, x: Any, scale: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(key)
        return key, x * scale + jax.random.normal(now, x.shape)

    made = parallel(draw, static_argnums=2, donate_argnums=0)
    plain = jax.jit(draw, static_argnums=2)
    kinds = [(size, scale) for size in (8, 16) for scale in (1, True)]
    key, expected = jax.random.key(0), jax.random.key(0)
    for number in range(8):
        if number == 7:
            without_python(made, monkeypatch)
        for size, scale in kinds:
            x = np.ones(size, np.float32)
            (key, y), (expected, other) = made(key, x, scale), plain(expected, x, scale)
            assert_equal(y, other)
            assert key == expected


@pytest.mark.parametrize(
    "activation",
    [slow(None), jnp.tanh],
    ids=["arrays", "constants"],
)
def test_calls_under_other_settings_are_traced_under_them(activation: Any) -> None:
    """Types and random bits of whichever setting the caller has, as `jax.jit` does."""

    def draw(layer: Layer, x: jax.Array) -> Any:
        bits = jax.random.normal(jax.random.key(0), (3,))
        return x.astype(float).sum() * (1 + 1e-12), jnp.arange(4), bits, layer.kernel

    made = parallel(draw, donate_argnums=())
    plain = jax.jit(lambda kernel, x: draw(Layer(kernel, None, None), x))
    settings = [
        contextlib.nullcontext,
        lambda: jax.enable_x64(True),
        lambda: jax.threefry_partitionable(False),
    ]
    for setting in (*settings, *settings, *settings):
        with setting():
            ours = made(Layer(BATCH, activation, None), BATCH)
            theirs = plain(BATCH, BATCH)
        assert_equal(ours, theirs)
        assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert len(made._running()) == len(settings)


def test_a_deleted_or_repeated_buffer_is_seen_before() -> None:
    made = parallel()
    old, _ = made(a_state(), BATCH)
    new, _ = made(old, BATCH)
    new, _ = made(new, BATCH)
    with pytest.raises(RuntimeError, match=r"state\['a'\], state\['b'\] was given"):
        made(old, BATCH)
    new, _ = made(new, BATCH)  # it goes on
    new["b"].delete()
    with pytest.raises(RuntimeError, match=r"donated once, but state\['b'\]"):
        made(new, BATCH)
    twice = parallel(lambda pair, batch: ([x + batch.mean() for x in pair], batch))
    pair = twice([a_state()["a"], a_state()["a"]], BATCH)[0]
    pair = twice(pair, BATCH)[0]
    assert_equal(twice([pair[0], pair[0]], BATCH)[0][1], np.full((64, 8), 94.5))


def test_one_donated_array_among_many_is_seen() -> None:

    made = parallel(lambda xs, batch: ([x + batch.mean() for x in xs], batch.sum()))
    states = [[np.full(8, i, np.float32) for i in range(40)]]
    for _ in range(5):
        states.append(made(states[-1], BATCH)[0])
    for old in (3, 4):
        mixed = [*states[-1]]
        mixed[17] = states[old][17]
        with pytest.raises(RuntimeError, match=r"but xs\[17\] was given"):
            made(mixed, BATCH)
    states.append(made(states[-1], BATCH)[0])
    assert_equal(states[-1][17], np.full(8, 17 + 6 * BATCH.mean()))


def test_arrays_that_lie_elsewhere_are_moved_in_every_call() -> None:
    made = parallel(donate_argnums=())
    state = made(made(a_state(), BATCH)[0], BATCH)[0]
    mesh = state["a"].sharding.mesh
    elsewhere = {
        "a": jax.device_put(state["a"], NamedSharding(mesh, PartitionSpec(None, "x"))),
        "b": jax.device_put(state["b"], jax.devices()[3]),
    }
    for each in (elsewhere, state, elsewhere, state, elsewhere):
        assert_equal(made(each, BATCH), jax.jit(step)(a_state_of(each), BATCH))


def a_state_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in state.items()}


def test_arrays_of_one_cpu_are_cut_without_a_program_for_each_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, batch = parallel(), jnp.asarray(BATCH)
    state = jax.tree.map(jnp.asarray, a_state())
    start = jax.tree.map(np.asarray, state)
    with jax.log_compiles():
        for _ in range(3):
            state = made(state, batch)[0]
    names = [r.getMessage() for r in caplog.records if "compilation of" in r.message]
    assert ["jit(step)" in name for name in names] == [True]
    assert_equal(state["a"], start["a"] + 3 * 31.5)
    assert_equal(start, a_state())  # what was donated was a copy


def test_callbacks_take_python_and_get_it(capfd: pytest.CaptureFixture[str]) -> None:
    def talks(state: Any, batch: Any) -> Any:
        jax.debug.print("sum {}", batch.sum())
        return state + batch.mean()

    talking, state = parallel(talks), np.zeros(8, np.float32)
    for number in range(1, 5):
        state = talking(state, BATCH)
        assert_equal(state, np.full(8, number * BATCH.mean()))
    assert capfd.readouterr().out.count("sum 2016") == 4


def test_a_call_inside_a_transformation_joins_it() -> None:
    made = parallel(lambda x, y: (x * y).sum())
    x, y = jnp.arange(8.0), jnp.ones(8)
    for _ in range(3):
        assert made(x, y) == 28
        np.testing.assert_array_equal(jax.grad(made)(x, y), y)


def test_nan_checks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parallel(lambda x: jnp.log(x))
    for _ in range(3):
        made(jnp.ones(8))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        made(-jnp.ones(8))
    assert np.isnan(made(-jnp.ones(8))).all()


def test_a_function_that_is_let_go_is_collected() -> None:
    gc.freeze()  # nothing older is collected, which takes seconds
    made = parallel(donate_argnums=())
    state = made(a_state(), BATCH)[0]
    for _ in range(3):
        made(state, BATCH)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
