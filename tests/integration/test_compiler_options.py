"""How programs are compiled where `XLA_FLAGS` does not say it."""

import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

import autopar

SCRIPT = """
import jax.numpy as jnp
import autopar
from autopar.lowering.memory_use import MemoryUse

def step(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x

ws = jnp.ones((8, 64, 64))
compiled = autopar.parallelize(step, mesh="x:8").lower(ws, jnp.ones((8, 64))).compile()
print(compiled.plan.predicted.peak_bytes, MemoryUse.of(compiled.compiled).device_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "is_as_told"),
    [
        ("", True),
        ("--xla_cpu_enable_concurrency_optimized_scheduler=true", False),
    ],
    ids=["none", "the user's"],
)
def test_programs_run_in_the_order_that_memory_is_predicted_of(
    flags: str, is_as_told: bool
) -> None:
    """XLA's usual order for CPUs makes all slices of the weights first."""
    flags = f"--xla_force_host_platform_device_count=8 {flags}"
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    told, held = map(int, found.stdout.split()[-2:])
    assert (told == pytest.approx(held, rel=0.15)) is is_as_told


@pytest.mark.parametrize(
    ("flags", "is_chosen"),
    [
        ("--xla_force_host_platform_device_count=8", True),
        ("--xla_cpu_enable_concurrency_optimized_scheduler=true", False),
        ("--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT", False),
    ],
)
def test_an_order_that_the_user_names_is_left_alone(
    flags: str, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    lowered = autopar.parallelize(lambda x: x + 1, mesh="x:8").lower(jnp.ones(8))
    assert ("xla_cpu_scheduler_type" in lowered.program.compiler_options) is is_chosen
