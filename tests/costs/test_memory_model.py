"""The model of a compiled program's memory: kernels, their order, and what is live."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.costs.execution_order import run_in_order
from autopar.costs.instructions import Instructions
from autopar.costs.kernels import Kernel, KernelBlock, Value, gathers_minor, turns
from autopar.costs.memory import MemoryProfile, memory_profile, peak_bytes


def profile_of(fun: Callable[..., Any], *args: Any) -> tuple[MemoryProfile, int]:
    """The prediction on one device, and what the compiled program takes there."""
    mesh = jax.make_mesh(
        (1,), ("x",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)
    )
    lowered = autopar.parallelize(fun, mesh=mesh).lower(*args)
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    assert profile.peak_bytes == peak_bytes(lowered.graph, lowered.plan.sharding)
    compiled = lowered.compile()
    return profile, MemoryUse.of(compiled.compiled).device_bytes


def kernels_of(fun: Callable[..., Any], *args: Any) -> list[str | None]:
    """Kinds of the operators that are kernels of their own, in traced order."""
    profile, _ = profile_of(fun, *args)
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    kernels = profile.liveness[0].block.kernels
    return [None if k.operator is None else kinds[k.operator] for k in kernels]


X = jnp.ones((64, 64))


def test_elementwise_operators_fuse_into_one_kernel() -> None:
    assert kernels_of(lambda x: (x + 1.0) * 2.0 - x, X) == ["sub"]


def test_products_read_memory_and_write_memory() -> None:
    kinds = kernels_of(lambda x: (x + 1.0) @ (x * 2.0), X)
    assert sorted(map(str, kinds)) == ["add", "dot_general", "mul"]


Y = jnp.ones((8, 16, 32))


def test_a_product_reads_copies_in_its_own_order() -> None:
    """Summed dims last on the left and first on the right; matrices are as they are."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tensordot(x, y, ((0, 1), (0, 1)))  # dims b s h, summed over b s

    assert kernels_of(step, Y, Y) == [None, "dot_general"]  # the left one is turned
    assert kernels_of(lambda x: x.T @ x, X) == ["dot_general"]
    whole = kernels_of(lambda x, w: x @ w, Y, jnp.ones((32, 4)))
    assert whole == ["dot_general"]


def test_what_is_cheap_is_made_in_each_order_that_products_read() -> None:
    """Then it is not kept, but what it is made of is."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        cheap = x * 2.0
        return jnp.tensordot(cheap, y, ((0, 1), (0, 1))) @ jnp.tensordot(
            y, cheap, ((0, 1), (0, 1))
        )

    kinds = kernels_of(step, Y, Y)
    assert "mul" not in kinds
    assert kinds.count(None) == 3  # both in both orders, but y in its own is there
    profile, compiled = profile_of(step, Y, Y)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.02)


def test_an_expensive_operator_with_two_readers_is_done_once() -> None:
    once = kernels_of(lambda x: jnp.exp(x) + 1.0, X)
    twice = kernels_of(lambda x: (jnp.exp(x) @ x, jnp.exp(x) + 1.0), X)
    assert "exp" not in once and "exp" in twice


def test_only_a_cut_along_a_minor_dim_turns_its_operand() -> None:
    assert not turns((0,), (-1,))  # gathered
    assert not turns((-1,), (1,))  # cut out of what is there
    assert not turns((-2,), (0,))  # summed and cut along the major dim
    assert turns((-2,), (1,)) and turns((0,), (1,))


def test_only_what_is_gathered_along_a_minor_dim_lies_otherwise() -> None:
    assert gathers_minor((1,), (-1,))
    assert gathers_minor((0, 1), (0, -1))
    assert not gathers_minor((0,), (-1,))
    assert not gathers_minor((-1,), (1,))


def test_a_loop_reads_a_copy_of_what_is_gathered_along_a_minor_dim() -> None:
    """As the stacked residuals of a recurrent network over a split batch."""

    def step(xs: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)[0]

    pins = {"xs": PartitionSpec(None, "x"), "w": PartitionSpec(None, "x")}
    given = jnp.ones((32, 16, 16)), jnp.ones((16, 16))
    lowered = autopar.parallelize(step, mesh="x:8", pins=pins).lower(*given)
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    use = MemoryUse.of(lowered.compile().compiled)
    assert profile.peak_bytes == pytest.approx(use.device_bytes, rel=0.05)


def test_what_is_made_twice_is_made_once() -> None:
    """What reads equal results is equal too, as far as it is made in equal specs."""

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(x @ x) @ x, jnp.exp(x @ x) + 1.0

    assert sorted(map(str, kernels_of(step, X))) == [
        *("add", "dot_general", "dot_general", "exp")
    ]


def test_an_exponential_is_kept_from_the_erfc_that_makes_it_too() -> None:
    """The gradient of gelu reads exp(-x^2), which XLA makes inside of erfc."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.gelu(x @ x, approximate=False) @ x)

    kinds = kernels_of(jax.grad(loss), X)
    assert kinds.index("erfc") < kinds.index("exp") and kinds.count("exp") == 1
    profile, compiled = profile_of(jax.grad(loss), X)
    order = [kinds[k] for k in profile.liveness[0].order]
    assert order.index("exp") < order.index("erfc")
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.05)


def test_dropout_keeps_the_words_of_its_bits() -> None:
    """Words are drawn in loops, and backward makes masks of the words again."""

    def step(weights: tuple[jax.Array, ...], x: jax.Array, key: jax.Array) -> Any:
        def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
            hidden = x
            for layer, weight in enumerate(weights):
                hidden = jnp.tanh(hidden @ weight)
                drawn = jax.random.fold_in(key, layer)
                kept = jax.random.bernoulli(drawn, 0.9, hidden.shape)
                hidden = jnp.where(kept, hidden / 0.9, 0)
            return jnp.sum(hidden**2)

        return jax.grad(loss)(weights)

    weights = tuple(jnp.ones((32, 32)) for _ in range(4))
    profile, compiled = profile_of(
        step, weights, jnp.ones((2048, 32)), jax.random.key(0)
    )
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.03)


def test_a_product_that_sums_one_element_fuses_as_a_multiplication() -> None:
    """So are gradients of single examples made, as in DP-SGD."""

    def clipped(inputs: jax.Array, cotangents: jax.Array) -> jax.Array:
        return jnp.clip(jnp.einsum("bki,bkj->bij", inputs, cotangents), -1, 1)

    given = jnp.ones((16, 1, 64)), jnp.ones((16, 1, 64))
    assert "dot_general" not in kernels_of(clipped, *given)
    profile, compiled = profile_of(clipped, *given)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.01)


def test_gradients_of_depthwise_kernels_pair_all_channels() -> None:
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=names, feature_group_count=32
        )

    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.grad(lambda kernel: jnp.sum(convolve(x, kernel) ** 2))(kernel)

    given = jnp.ones((4, 8, 8, 32)), jnp.ones((5, 5, 1, 32))
    profile, compiled = profile_of(gradient, *given)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.15)


def test_loops_make_constants_and_cheap_results_themselves() -> None:
    """A filled array that a body reads, and a sum that is stacked and read."""

    def step(x: jax.Array) -> Any:
        filled = jnp.full((64, 64), 2.0)

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            grown = carry @ x + filled
            return jnp.tanh(grown), grown

        return jax.lax.scan(body, x, None, 5)

    profile, _ = profile_of(step, X)
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    body = profile.graph.blocks[1].index
    made = [
        kinds[kernel.operator]
        for block in (0, body)
        for kernel in profile.liveness[block].block.kernels
        if kernel.operator is not None and kernel.writes
    ]
    assert made == ["scan", "dot_general", "tanh"]


def chain(num_values: int, *, is_elementwise: bool) -> KernelBlock:
    values = tuple(Value(i, (), 100, False) for i in range(num_values))
    kernels = tuple(
        Kernel(i, (i - 1,) if i else (), (i,), is_elementwise=is_elementwise)
        for i in range(num_values)
    )
    return KernelBlock(values, kernels, (num_values - 1,), ())


def test_a_chain_holds_what_is_read_and_what_is_written() -> None:
    liveness = run_in_order(chain(4, is_elementwise=False))
    assert liveness.order == (0, 1, 2, 3)
    assert liveness.bytes.tolist() == [100, 200, 200, 100]  # results are not temporary


def test_an_elementwise_kernel_writes_over_what_it_reads_last() -> None:
    liveness = run_in_order(chain(4, is_elementwise=True))
    assert liveness.peak_bytes == 100


def test_a_scatter_writes_over_what_it_adds_to() -> None:
    """The gradient of a table: zeros, and the rows that were read."""
    table, rows = jnp.ones((512, 64)), jnp.zeros((8,), jnp.int32)

    def step(table: jax.Array) -> jax.Array:
        grad = jax.grad(lambda table: jnp.sin(table[rows]).sum())(table)
        return grad @ jnp.ones((64, 8))

    profile, compiled = profile_of(step, table)
    assert profile.temp_bytes < 1.2 * table.nbytes
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.03)


def test_what_has_more_behind_it_runs_first() -> None:
    """Depth first: the branch with more readers of its values comes before."""
    values = tuple(Value(i, (), 10, False) for i in range(4))
    kernels = (
        Kernel(0, (), (0,)),
        Kernel(1, (), (1,)),
        Kernel(2, (1,), (2,)),
        Kernel(3, (0, 2, 1), (3,)),
    )
    block = KernelBlock(values, kernels, (3,), ())
    assert run_in_order(block).order == (1, 2, 0, 3)


def test_an_input_read_after_its_replacement_is_copied() -> None:
    values = (
        Value(0, (), 100, False, is_outside=True),
        Value(1, (), 100, False),
        Value(2, (), 100, False),
    )
    kernels = (Kernel(0, (0,), (1,)), Kernel(1, (0,), (2,)))
    kept = (1, 2)
    assert run_in_order(KernelBlock(values, kernels, kept, ((0, 1),))).duplicated == {0}
    assert not run_in_order(KernelBlock(values, kernels, kept, ())).duplicated


def test_what_is_read_behind_a_barrier_comes_after_it() -> None:
    """The second reader of value 0 reads it as value 2, which a barrier lets pass."""
    values = tuple(Value(i, (), 10, False) for i in range(5))
    kernels = (
        Kernel(0, (), (0,)),
        Kernel(1, (), (1,)),
        Kernel(2, (0, 1), (2,)),
        Kernel(3, (0, 2), (3,)),
        Kernel(4, (0, 3), (4,)),
    )
    block = KernelBlock(values, kernels, (4,), (), {2: 0})
    found = Instructions.of(block, ())
    first, second = found.starts[[3, 4]].tolist()
    assert found.operands[first:second].tolist() == [5]  # the part, not its maker
    assert run_in_order(block).order == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(("num_read", "order"), [(1, (3, 4)), (2, (4, 3))])
def test_sums_over_paths_are_capped(num_read: int, order: tuple[int, int]) -> None:
    """Two results that are equal but for the place: where bytes on paths are counted
    twice they reach their cap, the bytes of all that comes before, and the last result
    is visited first."""
    read = (1, 2)[-num_read:]
    kernels = (
        Kernel(0, (), (0,)),
        Kernel(1, (0,), (1,)),
        Kernel(2, (0, 1), (2,)),
        Kernel(3, read, (3,)),
        Kernel(4, read, (4,)),
    )
    values = tuple(Value(i, (), 10, False) for i in range(5))
    block = KernelBlock(values, kernels, (3, 4), ())
    assert run_in_order(block).order == (0, 1, 2, *order)


def test_memory_of_an_input_is_lent_until_its_replacement_is_made() -> None:
    values = (
        Value(0, (), 100, False, is_outside=True),
        *(Value(i, (), 100, False) for i in (1, 2, 3, 4)),
    )
    kernels = tuple(Kernel(i, (i,), (i + 1,)) for i in range(4))
    block = KernelBlock(values, kernels, (4,), ((0, 4),))
    liveness = run_in_order(block)
    assert liveness.borrowed
    assert (
        liveness.peak_bytes
        < run_in_order(KernelBlock(values, kernels, (4,), ())).peak_bytes
    )


STEPS: dict[str, Callable[..., Any]] = {
    "product": lambda x: (x @ x).sum(),
    "two products": lambda x: jnp.tanh(x @ x) @ x,
    "gradient": lambda x: x - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w @ w)))(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ x), c), x, None, 5),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_parts_of_a_prediction_are_its_peak(name: str) -> None:
    profile, _ = profile_of(STEPS[name], X)
    parts = profile.argument_bytes + profile.output_bytes + profile.temp_bytes
    assert parts == profile.peak_bytes
    assert sum(value.bytes for value in profile.temporaries()) <= profile.temp_bytes


def test_gradients_are_reduced_one_by_one() -> None:
    """As one all_reduce of all, they would be in memory together."""

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            hidden = x
            for kernel in params:
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.sum(hidden)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = [jnp.ones((64, 64))] * 4
    method = autopar.DataParallel()
    parallel = autopar.parallelize(step, mesh="data:8", method=method)
    compiled = parallel.lower(params, jnp.ones((64, 64))).compile()
    assert compiled.as_text().count(" all-reduce(") == len(params)
    use = MemoryUse.of(compiled.compiled)
    predicted = compiled.plan.predicted.peak_bytes
    assert predicted == pytest.approx(use.device_bytes, rel=0.02)
    assert use.temp_bytes < 4 * params[0].nbytes


def test_a_product_of_joined_dims_is_not_written_over() -> None:
    """It is written as a matrix, which is not of its readers' dims."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w)
        return jnp.max(y, axis=-1) + jnp.sum(y @ w, axis=-1)

    for shape, end in (((8, 16, 32), 1), ((128, 32), 0)):
        profile, _ = profile_of(step, jnp.ones(shape), jnp.ones((32, 32)))
        liveness = profile.liveness[0]
        (first,) = liveness.block.kernels[liveness.order[0]].writes
        assert liveness.ends[first] == end


def test_memory_of_inputs_is_lent_in_post_order() -> None:
    """The first of two values that fit takes it, be it a copy of an input or not."""
    x = Value(0, (), 8, False, True)
    made = [Value(tensor, (), 8, False) for tensor in range(1, 7)]
    values = (x, x._replace(tensor=7), *made)
    kernels = (
        Kernel(0, (0,), (2,)),
        Kernel(1, (2,), (3,)),  # between the uses of `x` and of the other input
        Kernel(2, (3, 1), (4,)),
        Kernel(3, (4,), (5,)),  # replaces `x`
        Kernel(4, (5, 1), (6,)),
        Kernel(5, (4,), (7,)),  # replaces the other, which is read later
    )
    liveness = run_in_order(KernelBlock(values, kernels, (6, 5, 7), ((0, 5), (1, 7))))
    assert liveness.duplicated == {1}
    assert liveness.borrowed == {2: 1, 3: 0}  # the other is free from its copy on


def test_predicted_is_what_is_compiled() -> None:
    profile, compiled = profile_of(STEPS["two products"], X)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.01)
