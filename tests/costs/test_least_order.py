"""The order of one accelerator's program: valid, and of the least memory of three."""

import random
from dataclasses import replace

import pytest

import autopar
from autopar.costs.execution_order import run_in_order
from autopar.costs.kernels import Kernel, KernelBlock, Value
from autopar.costs.memory import memory_profile
from autopar.planner.planning import plan_function
from benchmarks.models import build


def recomputing(num_layers: int) -> KernelBlock:
    """A chain of cotangents, each of which reads something large that is made again.

    Values: layer k makes 2 k + 1, large, of value 0, and 2 k + 2 of it and 2 k.
    """
    values = [Value(0, (), 1, False)]
    kernels = [Kernel(0, (), (0,))]
    for layer in range(num_layers):
        large, cotangent = 2 * layer + 1, 2 * layer + 2
        values += [Value(large, (), 100, False), Value(cotangent, (), 1, False)]
        kernels.append(Kernel(large, (0,), (large,)))
        kernels.append(Kernel(cotangent, (large, large - 1), (cotangent,)))
    return KernelBlock(values, kernels, (2 * num_layers,), ())


def test_what_is_large_is_made_when_it_is_read() -> None:
    """All of it first, as depth first may, holds every layer's."""
    block = recomputing(6)
    found = run_in_order(replace(block, is_alone=True))
    assert found.peak_bytes <= 103
    assert run_in_order(block).peak_bytes >= found.peak_bytes


@pytest.mark.parametrize("seed", range(40))
def test_no_order_is_worse_than_depth_first_and_all_read_what_is_made(
    seed: int,
) -> None:
    pick = random.Random(seed)
    count = pick.randint(2, 24)
    values = tuple(Value(i, (), pick.choice((1, 8, 64)), False) for i in range(count))
    kernels = tuple(
        Kernel(
            i, tuple(sorted(pick.sample(range(i), min(i, pick.randint(0, 3))))), (i,)
        )
        for i in range(count)
    )
    block = KernelBlock(values, kernels, (count - 1,), ())
    found = run_in_order(replace(block, is_alone=True))
    assert sorted(found.order) == list(range(count))
    place = {kernel: position for position, kernel in enumerate(found.order)}
    for kernel in kernels:
        for value in kernel.reads:
            assert place[value] < place[kernel.writes[0]]
    assert found.peak_bytes <= run_in_order(block).peak_bytes


def test_layers_made_again_are_held_one_by_one_on_one_gpu() -> None:
    """Compiled for an H100 a GPT of 24 such layers takes 0.44 of what the order of CPUs
    would (docs/measurements.md, "On a GPU")."""
    workload = build("gpt", num_layers=6, remat=True, batch_size=64)
    cluster = autopar.Cluster.preset("1x1xH100")
    step = autopar.parallelize(workload.step, cluster=cluster)
    planned = plan_function(workload.step, workload.abstract(), {}, step.options)
    plan = planned.plan.sharding
    own = memory_profile(planned.graph, plan)
    elsewhere = memory_profile(planned.graph, replace(plan, device_kind="CPU"))
    assert own.argument_bytes == elsewhere.argument_bytes
    assert own.temp_bytes < 0.6 * elsewhere.temp_bytes
