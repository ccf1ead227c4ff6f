"""What a step holds at its peak, told by hand and as compiled for one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar.costs.memory import MemoryProfile, memory_profile, peak_bytes
from autopar.lowering.memory_use import MemoryUse
from autopar.steps.lowered_step import Lowered
from benchmarks.models import build
from tests.planner.deep_step import step as deep_step

X = jnp.ones((64, 64))
Y = jnp.ones((64, 64)) * 2.0


def lowered(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """On one device, if nothing else is said."""
    mesh = jax.make_mesh(
        *((1,), ("x",)), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)
    )
    return autopar.parallelize(fun, **{"mesh": mesh, **options}).lower(*args)


def profile_of(step: Lowered) -> MemoryProfile:
    graph, plan = step.graph, step.plan.sharding
    profile = memory_profile(graph, plan)
    assert profile.peak_bytes == peak_bytes(graph, plan)
    return profile


def matrices(fun: Callable[..., Any], *args: Any, **options: Any) -> float:
    """How many matrices like `X` temporaries take at the peak."""
    profile = profile_of(lowered(fun, *args, **options))
    return profile.blocks[0].peak_bytes / X.nbytes


def kernels(fun: Callable[..., Any], *args: Any) -> list[str]:
    """Kinds of what runs in the outermost block, in order."""
    profile = profile_of(lowered(fun, *args))
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    return [kinds[index] for index in profile.blocks[0].operators if index >= 0]


def product(x: jax.Array) -> jax.Array:
    """Its result is the step's, its operand is not."""
    return x @ x


def test_arguments_and_results_are_held_throughout() -> None:
    profile = profile_of(lowered(lambda x: (x @ x, jnp.sum(x)), X))
    assert profile.argument_bytes == X.nbytes
    # And a pointer to each; the first takes no memory besides.
    assert profile.output_bytes == X.nbytes + 4 + 2 * 8
    assert profile.temp_bytes == 0
    assert profile.peak_bytes == profile.argument_bytes + profile.output_bytes


def test_on_a_tpu_what_fits_its_vmem_takes_no_memory() -> None:
    step = autopar.parallelize(
        lambda x: jnp.sum(x @ x), mesh="x:1", cluster=autopar.Cluster.preset("1xv5e")
    )

    def temporaries(length: int) -> float:
        plan = step.plan(jax.ShapeDtypeStruct((length, length), jnp.float32))
        return plan.predicted.peak_bytes - 4 * length**2

    assert temporaries(4096) < 100
    assert temporaries(8192) == pytest.approx(1.1 * 2**28 - 2**27, abs=100)


def test_on_tpus_a_gradient_is_scattered_before_the_next_is_made() -> None:
    """As their compiler has it, however many layers there are."""
    cluster = autopar.Cluster.preset("v5e:2x4")
    sizes: dict[str, Any] = {"batch_size": 8, "seq_len": 1024, "hidden": 1024}
    sizes |= {"width": 4096, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 1024}

    def temporaries(num_layers: int) -> int:
        model = build("llama-8b", remat=True, num_layers=num_layers, **sizes)
        step = autopar.parallelize(
            model.step, mesh="x:8", cluster=cluster, method=autopar.Zero(3)
        )
        plan = step.plan(*model.abstract())
        return plan.predicted.peak_bytes - plan.sharding.state_bytes()

    few, many = temporaries(1), temporaries(3)
    assert 0 < few < many < 1.5 * few


def test_a_view_takes_no_memory() -> None:
    def step(x: jax.Array) -> jax.Array:
        return product((x @ x).reshape(32, 128)[None].reshape(64, 64))

    assert matrices(step, X) == 1
    assert kernels(step, X) == ["dot_general", "dot_general"]


def test_elementwise_values_are_made_in_their_reader() -> None:
    assert kernels(lambda x: jnp.sum(jnp.tanh(x * 2.0) + 1.0), X) == ["reduce_sum"]
    assert kernels(lambda x: jnp.tanh(x * 2.0) + 1.0, X) == ["add"]
    assert matrices(lambda x: jnp.tanh(x * 2.0) + 1.0, X) == 0


def test_operands_of_a_product_are_in_memory() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * 2.0) @ (x + 1.0)

    assert kernels(step, X) == ["tanh", "add", "dot_general"]
    assert matrices(step, X) == 2


def test_what_several_read_is_in_memory_if_more_would_be_read_for_it() -> None:
    """A sum of two products in two readers: both products would be read twice."""

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = x @ y + y @ x
        return jnp.tanh(total), jnp.sin(total)

    def of_one(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.abs(x @ y)
        return jnp.tanh(total), jnp.sin(total)

    assert "add" in kernels(step, X, Y)
    assert "abs" not in kernels(of_one, X, Y)


def test_an_elementwise_kernel_writes_over_what_nobody_reads_later() -> None:
    def step(x: jax.Array) -> jax.Array:
        y = x @ x
        for _ in range(3):
            y = jnp.tanh(y) @ x  # the tangent where the product lay, then the next
        return y

    def read_later(x: jax.Array) -> jax.Array:
        y = x @ x
        return (jnp.tanh(y) @ x) @ y

    assert matrices(step, X) == 2
    assert matrices(read_later, X) == 3  # `y`, its tangent and the product of that


def test_the_next_value_of_state_lies_over_the_old_one() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * (w @ x), jnp.sum(x)

    def read_after(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = w - 0.1 * x
        return new, jnp.sum((new @ x) @ w)

    profile = profile_of(lowered(step, X, Y))
    assert profile.output_bytes < X.nbytes
    assert matrices(step, X, Y) == 1  # the product
    # The new value lies apart while the old one is read, beside two products.
    assert matrices(read_after, X, Y) == pytest.approx(3, abs=0.01)


def test_what_is_read_while_it_is_made_lies_apart() -> None:
    """A product reads the whole of its operands, a loop what it goes along."""

    def multiplied(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w @ x, jnp.sum(x)

    def along(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, w = lax.scan(lambda c, w: (c, w + c), x[0], w)
        return w, jnp.sum(x)

    def added(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w + x, jnp.sum(x)

    for fun, held in ((multiplied, 1), (along, 1), (added, 0)):
        options = {"donate_argnums": (0,)}
        assert matrices(fun, X, Y, **options) == pytest.approx(held, abs=0.05)
        step = lowered(fun, X, Y, **options)
        used = MemoryUse.of(step.compile().compiled)
        profile = profile_of(step)
        swept = profile.peak_bytes - profile.temp_bytes + profile.blocks[0].peak_bytes
        assert swept == pytest.approx(used.device_bytes, rel=0.05)


def test_a_loop_takes_its_body_once_and_its_carry() -> None:
    def loop(length: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def step(x: jax.Array, w: jax.Array) -> jax.Array:
            def body(_: int, c: jax.Array) -> jax.Array:
                return jnp.tanh(c @ w) @ x

            return jnp.sum(lax.fori_loop(0, length, body, x @ w))

        return step

    assert matrices(loop(3), X, Y) == matrices(loop(30), X, Y)
    # The carry, which begins as a product, and the product in the body.
    assert matrices(loop(3), X, Y) == pytest.approx(2, abs=0.01)


def test_what_a_loop_stacks_is_there_in_full() -> None:
    def step(x: jax.Array) -> jax.Array:
        _, stack = lax.scan(lambda c, _: (jnp.tanh(c @ x), c @ x), x, None, length=7)
        return jnp.sum(stack)

    assert 7 + 1 <= matrices(step, X) <= 7 + 3


def test_a_loop_reads_a_slice_of_what_it_goes_along() -> None:
    stack = jnp.ones((9, 64, 64))

    def step(x: jax.Array, stack: jax.Array) -> jax.Array:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]

    assert matrices(step, X, stack) <= 3


def test_a_while_loop_takes_its_body_once() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda c: jnp.sum(c) < 3.0, lambda c: jnp.tanh(c @ w) @ w, x
        )

    assert matrices(step, X, Y) == pytest.approx(1, abs=0.01)


def test_of_a_conditional_the_larger_branch_counts() -> None:
    def small(x: jax.Array) -> jax.Array:
        return x * 2.0

    def large(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ x) @ x) @ (x @ x)

    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(p, large, small, x)

    profile = profile_of(lowered(step, jnp.bool(True), X))
    inner = [block.peak_bytes for number, block in profile.blocks.items() if number]
    assert min(inner) == 0 < max(inner)
    assert matrices(step, jnp.bool(True), X) == pytest.approx(matrices(large, X), 1e-3)


def test_what_several_readers_gather_is_held_from_the_first_to_the_last() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w)
        y = jnp.tanh(y @ y.T @ y)
        return jnp.sum(y @ w)

    pins = {"w": PartitionSpec("x"), "x": PartitionSpec("x")}
    found = lowered(step, jnp.ones((64, 64)), jnp.ones((16, 64)), mesh="x:8", pins=pins)
    profile = profile_of(found)
    (copy,) = (
        each
        for each in profile.blocks[0].values
        if each.is_copy and each.bytes == 64 * 64 * 4
    )
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    where = [
        place
        for place, index in enumerate(profile.blocks[0].operators)
        if kinds.get(index) == "dot_general"
    ]
    assert copy.start < where[0] < where[-1] == copy.end
    assert copy in profile.at_peak()


def test_what_is_made_again_is_made_when_it_is_read() -> None:
    """Not before, with all that it is for; nor do gradients wait for the last one."""
    kernel = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    given = [kernel] * 12, jax.ShapeDtypeStruct((8, 128, 32), jnp.float32)
    found = lowered(deep_step, *given, remat="full")
    held = MemoryUse.of(found.compile().compiled).device_bytes
    assert 0.75 < profile_of(found).peak_bytes / held < 1.35


@pytest.mark.parametrize("offload", [None, "state"])
def test_what_the_host_holds_is_not_counted(offload: str | None) -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(state["w"])
        moment = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.1 * moment, "m": moment}, loss

    args = {"w": X, "m": jnp.zeros_like(X)}, X
    profile = profile_of(lowered(step, *args, offload=offload))
    assert profile.argument_bytes == (1 if offload else 3) * X.nbytes


def test_the_peak_is_made_of_what_is_there() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * 2.0) @ (x + 1.0)

    profile = profile_of(lowered(step, X))
    assert sum(each.bytes for each in profile.at_peak()) == profile.blocks[0].peak_bytes
    temporary = round(profile.factor * profile.blocks[0].peak_bytes)
    assert profile.temp_bytes == temporary
    assert profile.bytes_at(int(profile.blocks[0].bytes.argmax())) == pytest.approx(
        profile.peak_bytes, abs=1
    )
    assert f"{profile.peak_bytes:,} B a device" in str(profile)


def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def stacked(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        last, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.mean(last**2)

    return w - 0.1 * jax.grad(loss)(w)


def chosen(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w) @ w, lambda x: x, x)


@pytest.mark.parametrize(
    ("step", "w", "x"),
    [
        (mlp, (64, 64), (256, 64)),
        (stacked, (4, 64, 64), (256, 64)),
        (chosen, (64, 64), (256, 64)),
    ],
)
def test_the_peak_is_near_the_compiled_program_s(
    step: Callable[..., Any], w: tuple[int, ...], x: tuple[int, ...]
) -> None:
    found = lowered(step, jnp.ones(w), jnp.ones(x))
    held = MemoryUse.of(found.compile().compiled).device_bytes
    assert 0.75 < profile_of(found).peak_bytes / held < 1.35


def clipped_by_example(weights: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """The gradient of each example, an outer product, is clipped."""

    def clipped(x: jax.Array, y: jax.Array) -> jax.Array:
        grad = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(weights)
        return grad / jnp.maximum(jnp.linalg.norm(grad), 1.0)

    return weights - 0.1 * jnp.mean(jax.vmap(clipped)(x, y), 0)


def sparse_product(data: jax.Array, indices: jax.Array, x: jax.Array) -> Any:
    def loss_of(data: jax.Array) -> jax.Array:
        product = x @ sparse.BCOO((data, indices), shape=(256, 512))
        return jnp.mean((product - 1) ** 2)

    return data - 0.1 * jax.grad(loss_of)(data)


INDICES = jnp.stack([jnp.arange(8192) % 256, jnp.arange(8192) // 16], 1)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (clipped_by_example, (jnp.ones((256, 256)),) * 3),
        (sparse_product, (jnp.ones(8192), INDICES, jnp.ones((256, 256)))),
    ],
)
def test_what_products_of_no_matrices_hold(step: Any, arguments: Any) -> None:
    found = autopar.parallelize(step, mesh="x:8").lower(*arguments).compile()
    compiled = MemoryUse.of(found.compiled).device_bytes
    assert found.plan.predicted.peak_bytes == pytest.approx(compiled, rel=0.25)


def test_rows_with_rows_are_read_inside_of_their_product() -> None:
    def of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bi,bi->b", x + 1, y)

    step = autopar.parallelize(
        of_rows, mesh="x:1", cluster=autopar.Cluster.preset("1xH100")
    )
    args = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = step.plan(args, args)
    assert plan.predicted.peak_bytes < 2.2 * 2**26 + 2**25
