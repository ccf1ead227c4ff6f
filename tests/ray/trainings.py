"""Models that train on two hosts and on one device, for tests to compare."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.api import ParallelFunction, parallelize
from autopar.clusters.cluster import Cluster
from autopar.methods.methods import Method, PipelineParallel, ShardParallel
from autopar.runtime.ray_workers import Workers
from benchmarks.models import Workload, build

TWO_STAGES = PipelineParallel(num_stages=2, num_microbatches=4)
FORMS = pytest.mark.parametrize(
    "method", [ShardParallel(), TWO_STAGES], ids=["one program", "two stages"]
)
MODELS = {  # batches are small beside the state
    "mlp": lambda: build("mlp", hidden=256, batch_size=16, optimizer="adamw_clip"),
    "gpt": lambda: build("gpt", num_layers=2),
}


class Training:
    """A parallel step on Ray, the same on one device, and arguments for both."""

    def __init__(self, workload: Workload, method: Method, cluster: Cluster) -> None:
        self.workload = workload
        mesh = "x:4" if isinstance(method, PipelineParallel) else "data:2;model:4"
        self.step: ParallelFunction = parallelize(
            workload.step, method=method, cluster=cluster, mesh=mesh
        )
        self.reference: Callable[..., Any] = jax.jit(workload.step)
        self.state: Any = workload.init(jax.random.key(0))
        self.batch: Any = workload.make_batch(0)

    @property
    def executable(self) -> Any:
        """What runs the step on the hosts."""
        (executable,) = self.step._running()
        return getattr(executable, "execute", executable)

    @property
    def workers(self) -> Workers:
        return self.executable.workers


def assert_close(got: Any, expected: Any) -> None:
    leaves = jax.tree.leaves(autopar.fetch(got)), jax.tree.leaves(expected)
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
