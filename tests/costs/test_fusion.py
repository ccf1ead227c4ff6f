"""What the compiler does inside another kernel, and what it keeps in memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from .test_memory_model import X, kernels_of, profile_of

WIDE = jnp.ones((64, 64, 64))


def twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads `x` in two places, neither of which needs it in memory."""
    return x * 2.0, x + 1.0


def test_what_is_padded_for_several_is_kept_before_its_sum_is() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        above, below = ((0, 64), (0, 0)), ((64, 0), (0, 0))
        return twice(jnp.pad(x * 2.0, above) + jnp.pad(y * 2.0, below))

    assert kernels_of(step, X, X) == ["pad", "pad", "mul", "add"]


def test_what_is_padded_for_one_is_not_kept() -> None:
    kinds = kernels_of(lambda x: jnp.pad(x * 2.0, ((0, 64), (0, 0))) + 1.0, X)
    assert kinds == ["add"]


@pytest.mark.parametrize(("rows", "is_kept"), [(64, True), (4, False)])
def test_long_rows_are_concatenated_apart(rows: int, is_kept: bool) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x + 1.0, x * 2.0], 1) - 3.0

    kinds = kernels_of(step, X[:rows, : 64 if is_kept else 4])
    assert kinds == (["add", "mul", "concatenate", "sub"] if is_kept else ["sub"])


def test_only_whole_divisions_and_gathers_are_not_repeated() -> None:
    assert kernels_of(lambda x, y: twice(x / y), X, X) == ["div", "mul", "add"]
    assert kernels_of(lambda x, y: twice(x / y), X, X[:, :1]) == ["mul", "add"]
    assert kernels_of(lambda x, y: twice(x / y), X, X[0, 0]) == ["mul", "add"]
    by_shared = kernels_of(lambda x, y: (*twice(x / y), y + 1.0), X, X[0, 0])
    assert by_shared[:3] == ["div", "mul", "add"]  # no reciprocal is taken
    rows = jnp.arange(32)
    assert "gather" in kernels_of(lambda x, i: twice(x[i]), X, rows)
    assert "cos" not in kernels_of(lambda x: twice(jnp.cos(x)), X)


def test_a_reduction_does_all_the_arithmetic_that_nothing_else_reads() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh((x - y) ** 3) * y, -1)

    assert kernels_of(loss, WIDE, WIDE) == ["reduce_sum"]
    profile, compiled = profile_of(loss, WIDE, WIDE)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.01)


def test_what_else_a_large_reduction_reads_is_kept() -> None:
    def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(x > 0, x * y, 0.0) * y, -1)

    def shared(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = x - y
        return jnp.sum(error**2, -1), error * 3.0

    assert kernels_of(chosen, WIDE, WIDE) == ["select_n", "reduce_sum"]
    assert kernels_of(chosen, X[0], X[0]) == ["reduce_sum"]
    assert "sub" in kernels_of(shared, WIDE, WIDE)
    for step in (chosen, shared):
        profile, compiled = profile_of(step, WIDE, WIDE)
        assert profile.peak_bytes == pytest.approx(compiled, rel=0.01)


def test_an_associative_scan_keeps_what_it_interleaves() -> None:
    """Mamba's: half of its memory is what is padded to be interleaved."""

    def loss(decay: jax.Array, x: jax.Array) -> jax.Array:
        def combined(
            left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return jnp.sum(lax.associative_scan(combined, (decay, x), axis=1)[1] ** 2)

    given = jnp.ones((8, 32, 64)), jnp.ones((8, 32, 64))
    profile, compiled = profile_of(jax.grad(loss, (0, 1)), *given)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.15)


def test_what_reads_one_array_is_done_again_beside_the_one_in_memory() -> None:
    """The product needs `y` in memory; the sum makes it again of `x`."""

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.abs(jnp.tanh(x @ w)) * 2.0
        return y @ w, y + 1.0

    profile, _ = profile_of(step, jnp.ones((256, 64)), X)
    block = profile.liveness[0].block
    kinds: dict[int | None, str] = {
        op.index: op.kind for op in profile.graph.operators()
    }
    made_by = {v: kinds.get(k.operator) for k in block.kernels for v in k.writes}
    (last,) = (k for k in block.kernels if kinds.get(k.operator) == "add")
    assert [made_by[value] for value in last.reads] == ["tanh"]
    assert "mul" in made_by.values()


def test_what_is_read_beside_a_way_through_a_product_is_kept() -> None:
    """It is not made of both operands again behind the product."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        gated = x * y
        return jnp.abs(gated) @ x * gated

    def unread(x: jax.Array, y: jax.Array) -> jax.Array:
        gated = x * y
        return jnp.abs(gated) @ x * x

    assert kernels_of(step, X, X).count("mul") == 2  # `gated` and the result
    assert kernels_of(unread, X, X).count("mul") == 1


def test_a_sum_of_products_is_made_again_behind_its_reshape() -> None:
    """Though both are read from memory then, and one of its readers is a reduction."""

    def step(x: jax.Array, y: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        total = x @ w + y @ v
        return jnp.tanh(total * jnp.max(total * x, -1, keepdims=True)) + total

    def reads_of_last(step: Callable[..., jax.Array], *given: jax.Array) -> list[str]:
        profile, _ = profile_of(step, *given)
        kinds = {op.index: op.kind for op in profile.graph.operators()}
        kernels = profile.liveness[0].block.kernels
        made_by = {v: kinds[k.operator or 0] for k in kernels for v in k.writes}
        (last,) = (k for k in kernels if k.writes[0] == max(made_by))
        return sorted(made_by[value] for value in last.reads if value in made_by)

    joined = reads_of_last(step, WIDE, 2.0 * WIDE, X, 2.0 * X)
    assert joined == ["dot_general", "dot_general", "reduce_max"]
    assert reads_of_last(step, X, 2.0 * X, X, 2.0 * X) == ["add", "reduce_max"]


def test_gradients_of_kernels_read_turned_images() -> None:
    names = ("NHWC", "HWIO", "NHWC")

    def convolved(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=names
        )

    def gradient(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda k: jnp.sum(jnp.tanh(convolved(k, x))))(kernel)

    given = jnp.ones((3, 3, 8, 8)), jnp.ones((8, 16, 16, 8))
    assert kernels_of(gradient, *given).count(None) == 2  # the image, its cotangent
    profile, compiled = profile_of(gradient, *given)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.05)
