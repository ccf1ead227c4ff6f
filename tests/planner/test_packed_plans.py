"""Plans within budgets of which more is needed than what is live at once."""

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.costs import memory
from autopar.costs.execution_order import Liveness
from autopar.costs.memory import memory_profile
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.plan_within import plan_within

from .tiny_gpt import MESH, gpt


@pytest.mark.slow
def test_a_plan_fits_as_the_compiler_packs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a heap leaves holes, less is live of what is found than may be."""

    def packed(liveness: Liveness, inner: np.ndarray) -> int:
        return int(1.1 * liveness.peak_bytes)

    monkeypatch.setattr(memory, "packed_peak", packed)
    held = plan_intra_op(gpt(), MESH, Cluster.local()).plan.predicted.peak_bytes
    budget = int(0.85 * held)
    found = plan_within(gpt(), MESH, Cluster.local(), budget).plan
    profile = memory_profile(gpt(), found)
    assert profile.live_bytes < profile.peak_bytes <= budget
    assert found.predicted.peak_bytes == profile.peak_bytes
