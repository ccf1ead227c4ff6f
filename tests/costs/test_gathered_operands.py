"""What is gathered along a minor dim, and the copies of it that products read."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.costs.instructions import Instructions
from autopar.costs.kernels import Kernel, KernelBlock, Value, exchanges
from autopar.costs.memory import MemoryProfile, memory_profile
from benchmarks.models import build

from .test_memory_model import profile_of as on_one_device

CHANNELS = PartitionSpec(None, None, None, "x")


def profile_of(step: Any, *args: Any) -> tuple[MemoryProfile, int]:
    """The prediction on all devices, and what the compiled program takes there."""
    lowered = step.lower(*args)
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    return profile, MemoryUse.of(lowered.compile().compiled).device_bytes


def test_only_axes_that_move_between_dims_exchange_parts() -> None:
    assert exchanges((0, 1), (1, 1)).tolist() == [True, False]
    assert not exchanges((0, -1), (-1, 0)).any()  # gathered, and cut out
    assert not exchanges((-2,), (1,)).any()  # summed and cut


def test_sequence_parallel_layers_hold_what_they_gather_and_its_copy() -> None:
    """Two products of a layer read it, forward and for the gradient of the weight."""
    workload = build("gpt", num_layers=1)
    megatron = autopar.Megatron(8, sequence=True)
    step = autopar.parallelize(workload.step, mesh="x:8", method=megatron)
    profile, compiled = profile_of(step, *workload.abstract())
    block = profile.liveness[0].block
    assert block.relaid
    for copy, gathered in block.relaid.items():
        assert block.values[copy].spec == block.values[gathered].spec
        assert block.values[copy].tensor == block.values[gathered].tensor
        assert block.kernels[block.maker[copy]].reads == (gathered,)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.05)


def test_a_convolution_reads_a_copy_of_channels_that_are_gathered() -> None:
    """Its weight's gradient reads another, turned, so what was gathered is kept."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            dims = ("NHWC", "HWIO", "NHWC")
            made = lax.conv_general_dilated(
                jnp.tanh(x), w, (1, 1), "SAME", dimension_numbers=dims
            )
            return (made**2).sum()

        return w - jax.grad(loss)(w)

    pins = {"x": CHANNELS, "w": CHANNELS}
    step = autopar.parallelize(step, mesh="x:8", pins=pins)
    profile, compiled = profile_of(
        step, jnp.ones((8, 8, 8, 64)), jnp.ones((3, 3, 64, 16))
    )
    block = profile.liveness[0].block
    assert [block.values[v].bytes for v in block.relaid] == [4 * 8 * 8 * 8 * 64]
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.05)


def test_parts_that_are_exchanged_are_counted_one_by_one() -> None:
    """Cut out, sent and put together, by instructions that read all that was there."""
    values = tuple(Value(i, (), 10, False) for i in range(3))
    kernels = (Kernel(0, (), (0,)), Kernel(None, (0,), (1,)), Kernel(1, (1,), (2,)))
    whole = Instructions.of(KernelBlock(values, kernels, (2,), ()), ())
    block = KernelBlock(values, kernels, (2,), (), exchanged={1: 4})
    found = Instructions.of(block, ())
    assert found.operands.tolist() == [0, 0, 0, 0, 1]
    assert found.num_readers().tolist() == [4, 1, 1]
    assert found.bytes.tolist() == [10, 20, 10]
    assert found.most == whole.most + 2 * 4


def test_what_a_collective_turns_is_counted_with_it() -> None:
    values = tuple(Value(i, (), 10, False) for i in range(2))
    kernels = (Kernel(0, (), (0,)), Kernel(None, (0,), (1,), inner_bytes=10))
    found = Instructions.of(KernelBlock(values, kernels, (1,), ()), ())
    assert found.bytes.tolist() == [10, 20]


def test_gathers_and_scatters_keep_the_dims_of_a_window_last() -> None:
    """Along another dim than the first, what they make or read is turned."""
    rows, x, w = jnp.arange(32) // 2, jnp.ones((64, 16, 64)), jnp.ones((64, 64))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.tanh(x @ w)[:, rows] @ w) ** 2).sum()

    profile, compiled = on_one_device(jax.grad(loss, (0, 1)), x, w)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.02)
