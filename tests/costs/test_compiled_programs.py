"""Rules of XLA by which a whole value is in memory or not."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.costs.memory import memory_profile
from benchmarks.models import build

from .test_memory_model import kernels_of, profile_of

X = jnp.ones((16, 64, 64))
ROWS, W = jnp.ones((512, 128)), jnp.ones((128, 128))


def test_a_turned_copy_does_not_lie_where_it_is_read() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
        return jnp.einsum("bmn,bnk->mk", rows, w)

    profile, compiled = profile_of(step, X, X)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.02)


def test_rows_and_columns_of_a_batch_of_matrices_are_read_as_they_lie() -> None:
    """The values are turned, as their heads do not come after the batch."""
    weights, values = jnp.ones((4, 8, 32, 32)), jnp.ones((4, 32, 8, 16))

    def attend(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("bnqk,bknd->bqnd", jnp.exp(weights), values)

    kinds = kernels_of(attend, weights, values)
    assert kinds.count(None) == 1 and "exp" in kinds


def test_equal_means_with_and_without_dims_of_one_are_made_once() -> None:
    """And so is what they are taken from."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return (y - y.mean(0)) @ w + (y - y.mean(0, keepdims=True)) @ w.T

    kinds = kernels_of(step, jnp.ones((512, 64)), jnp.ones((64, 64)))
    assert kinds.count("reduce_sum") == kinds.count("sub") == 1


def test_a_product_reads_a_copy_of_what_is_gathered_along_a_minor_dim() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    pins = {"x": PartitionSpec("x"), "w": PartitionSpec(None, "x")}
    lowered = autopar.parallelize(step, mesh="x:8", pins=pins).lower(ROWS, W)
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    use = MemoryUse.of(lowered.compile().compiled)
    assert use.temp_bytes >= 2 * W.nbytes
    assert profile.peak_bytes == pytest.approx(use.device_bytes, rel=0.05)


def test_a_sum_of_products_is_not_made_again_beside_a_reduction_of_it() -> None:
    """The reduction reads the sum of matrices, before it is reshaped."""

    def step(x: jax.Array, ws: list[jax.Array]) -> tuple[jax.Array, ...]:
        total = sum((x @ w for w in ws[1:]), x @ ws[0])
        bias = total.sum((0, 1))
        other = jnp.tanh(total) @ ws[0]
        return bias, jnp.sin(other) @ ws[1] + total * total

    weights = [jnp.ones((64, 64)) + i for i in range(3)]
    profile, _ = profile_of(step, X, weights)
    kernels = profile.liveness[0].block.columns
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    operators = enumerate(kernels.operator.tolist())
    first = [k for k, op in operators if kinds.get(op) == "dot_general"]
    made = kernels.writes[kernels.write_start[first[:3]]]
    assert all((kernels.reads == value).sum() == 1 for value in made)


def test_what_is_gathered_again_waits_for_what_it_is_read_with() -> None:
    """The cotangent is in memory by then, also where a product reads it otherwise."""
    case = build("gpt", num_layers=2, hidden=32, num_heads=4, vocab_size=64)
    step = autopar.parallelize(case.step, mesh="x:8", method=autopar.Zero(3))
    lowered = step.lower(*case.abstract())
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    kinds = {op.index: op.kind for op in profile.graph.operators()}
    kernels = profile.liveness[0].block.kernels
    kept = [k for k in kernels if k.operator is not None]
    barriers = [k for k in kept if kinds[k.operator or 0] == "optimization_barrier"]
    assert barriers and all(len(kernel.reads) == 2 for kernel in barriers)
    use = MemoryUse.of(lowered.compile().compiled)
    assert profile.peak_bytes == pytest.approx(use.device_bytes, rel=0.05)


def test_sums_of_microbatches_that_begin_as_one_zero_lie_apart() -> None:
    workload = build("gpt", num_layers=1)
    step = autopar.parallelize(workload.step, mesh="x:8", num_microbatches=2)
    lowered = step.lower(*workload.abstract())
    use = MemoryUse.of(lowered.compile().compiled)
    predicted = lowered.plan.predicted.peak_bytes
    assert predicted == pytest.approx(use.device_bytes, rel=0.03)


def test_a_guarded_update_runs_in_the_order_in_which_its_norm_is_summed() -> None:
    """The compiler visits what kernels read in the order in which it fused them."""

    def step(state: tuple[list[jax.Array], ...], x: jax.Array) -> object:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for each in weights[:-1]:
                y = jax.nn.gelu(y @ each)
            return jnp.mean((y @ weights[-1]) ** 2) * 128.0

        found, gradients = jax.value_and_grad(loss)(state[0])
        gradients = [each / 128.0 for each in gradients]
        is_good = jnp.isfinite(jnp.sqrt(sum(jnp.sum(g**2) for g in gradients)))
        sums = [0.9 * m + g for m, g in zip(state[1], gradients, strict=True)]
        weights = [w - 0.1 * m for w, m in zip(state[0], sums, strict=True)]
        new = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old), (weights, sums), state
        )
        return new, found

    weights = [*(jnp.ones((128, 128)) for _ in range(4)), jnp.ones((128, 32))]
    state = weights, [jnp.zeros_like(each) for each in weights]
    lowered = autopar.parallelize(step, mesh="x:8").lower(state, jnp.ones((64, 128)))
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    use = MemoryUse.of(lowered.compile().compiled)
    assert profile.peak_bytes == pytest.approx(use.device_bytes, rel=0.02)


@pytest.mark.parametrize("is_split", [True, False])
def test_parts_are_cut_off_one_by_one(is_split: bool) -> None:
    """Each when a product reads it; XLA has no operator that makes them all."""

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        parts = jnp.split(weights, 8) if is_split else jnp.unstack(weights)
        for part in parts:
            x = jnp.tanh(x @ part.reshape(64, 64))
        return x

    profile, compiled = profile_of(step, jnp.ones((8, 64, 64)), jnp.ones((32, 64)))
    assert profile.temp_bytes < 3 * 64 * 64 * 4
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.06)
