"""What gives way as a transformer's budget falls: state, activations, the plan."""

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.lowering.memory_use import MemoryUse
from benchmarks.models import build
from benchmarks.models.workload import Workload

# Of these dims eight devices divide the batch, the MLP's width and the vocabulary.
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "batch_size": 8,
    "seq_len": 12,
    "hidden": 20,
    "num_heads": 4,
    "vocab_size": 64,
    "tied": True,
    "scan_layers": True,
    "optimizer": "sgd",
}


def within(workload: Workload, budget: int | None) -> Any:
    return autopar.parallelize(
        workload.step, mesh="x:8", memory_budget=budget, remat="auto"
    )


@pytest.mark.slow
def test_state_is_sharded_then_activations_are_made_again_then_nothing_fits() -> None:
    """Each plan audited, compiled within its budget, and right."""
    workload = build("gpt", **SMALL)
    batch = workload.make_batch(1)
    start = workload.init(jax.random.key(0))
    expected = float(jax.jit(workload.step)(start, batch)[1]["loss"])
    plans: list[autopar.Plan] = []
    held: list[int] = []
    for fraction in (None, 0.92, 0.65):
        budget = int(fraction * held[0]) if fraction else None
        step = within(workload, budget)
        compiled = step.lower(*workload.abstract()).compile()
        compiled.audit().raise_if_wrong()
        plans.append(compiled.plan)
        held.append(MemoryUse.of(compiled.compiled).device_bytes)
        assert budget is None or held[-1] <= budget
        state = workload.init(jax.random.key(0))
        loss = float(compiled(state, batch)[1]["loss"])
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    state_bytes = [plan.sharding.state_bytes() for plan in plans]
    assert max(state_bytes[1:]) < 0.9 * state_bytes[0]
    assert plans[0].sharding.remat == "" != plans[2].sharding.remat
    seconds = [plan.predicted.step_seconds for plan in plans]
    assert seconds == sorted(seconds)

    too_little = held[0] // 5
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        within(workload, too_little).plan(*workload.abstract())
    least = raised.value.least_budget_bytes
    assert least is not None
    assert too_little < least < held[0]
