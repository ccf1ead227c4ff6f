"""The model of a compiled program's memory: kernels, their order, and what is live."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.costs.execution_order import run_in_order
from autopar.costs.kernels import Kernel, KernelBlock, Value, turns
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


def test_an_expensive_operator_with_two_readers_is_done_once() -> None:
    once = kernels_of(lambda x: jnp.exp(x) + 1.0, X)
    twice = kernels_of(lambda x: (jnp.exp(x) @ x, jnp.exp(x) + 1.0), X)
    assert "exp" not in once and "exp" in twice


def test_only_a_cut_along_a_minor_dim_turns_its_operand() -> None:
    assert not turns((0,), (-1,))  # gathered
    assert not turns((-1,), (1,))  # cut out of what is there
    assert not turns((-2,), (0,))  # summed and cut along the major dim
    assert turns((-2,), (1,)) and turns((0,), (1,))


def chain(num_values: int, *, is_elementwise: bool) -> KernelBlock:
    values = tuple(Value(i, (), 100, False) for i in range(num_values))
    kernels = tuple(
        Kernel(i, (i - 1,) if i else (), (i,), is_elementwise=is_elementwise)
        for i in range(num_values)
    )
    return KernelBlock(values, kernels, frozenset({num_values - 1}), ())


def test_a_chain_holds_what_is_read_and_what_is_written() -> None:
    liveness = run_in_order(chain(4, is_elementwise=False))
    assert liveness.order == (0, 1, 2, 3)
    assert liveness.bytes.tolist() == [100, 200, 200, 100]  # results are not temporary


def test_an_elementwise_kernel_writes_over_what_it_reads_last() -> None:
    liveness = run_in_order(chain(4, is_elementwise=True))
    assert liveness.peak_bytes == 100


def test_what_has_more_behind_it_runs_first() -> None:
    """Depth first: the branch with more readers of its values comes before."""
    values = tuple(Value(i, (), 10, False) for i in range(4))
    kernels = (
        Kernel(0, (), (0,)),
        Kernel(1, (), (1,)),
        Kernel(2, (1,), (2,)),
        Kernel(3, (0, 2, 1), (3,)),
    )
    block = KernelBlock(values, kernels, frozenset({3}), ())
    assert run_in_order(block).order == (1, 2, 0, 3)


def test_an_input_read_after_its_replacement_is_copied() -> None:
    values = (
        Value(0, (), 100, False, is_outside=True),
        Value(1, (), 100, False),
        Value(2, (), 100, False),
    )
    kernels = (Kernel(0, (0,), (1,)), Kernel(1, (0,), (2,)))
    kept = frozenset({1, 2})
    assert run_in_order(KernelBlock(values, kernels, kept, ((0, 1),))).duplicated == {0}
    assert not run_in_order(KernelBlock(values, kernels, kept, ())).duplicated


def test_memory_of_an_input_is_lent_until_its_replacement_is_made() -> None:
    values = (
        Value(0, (), 100, False, is_outside=True),
        *(Value(i, (), 100, False) for i in (1, 2, 3, 4)),
    )
    kernels = tuple(Kernel(i, (i,), (i + 1,)) for i in range(4))
    block = KernelBlock(values, kernels, frozenset({4}), ((0, 4),))
    liveness = run_in_order(block)
    assert liveness.borrowed
    assert (
        liveness.peak_bytes
        < run_in_order(KernelBlock(values, kernels, frozenset({4}), ())).peak_bytes
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


def test_predicted_is_what_is_compiled() -> None:
    profile, compiled = profile_of(STEPS["two products"], X)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.01)
