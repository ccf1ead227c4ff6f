"""One of two processes of four virtual devices: trains, and prints what it did as JSON.

Run as `spmd_script.py PLAN RANK PORT`.
"""

import hashlib
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PLAN = sys.argv[1]
RANK, PORT = map(int, sys.argv[2:4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}", 2, RANK, cluster_detection_method="deactivate"
)

import autopar  # noqa: E402
from autopar.planner import variant_search  # noqa: E402
from tests.ray import f3_training  # noqa: E402
from tests.rows.fixtures import tanh_chain  # noqa: E402


def without_source(text: str) -> str:
    """An HLO module without the tables of source lines, and what refers to them."""
    head, _, tail = text.partition("\n")
    computations = tail[tail.index("\n%") :]
    return head + re.sub(r", metadata=\{[^}]*\}", "", computations)


solved = 0


def plan_graph(*given: Any, **options: Any) -> Any:
    """Counts what is solved in this process, and not read."""
    global solved
    solved += 1
    return planned_before(*given, **options)


planned_before, variant_search.plan_graph = variant_search.plan_graph, plan_graph
total = autopar.parallelize(lambda x: x.sum(), mesh="x:8")
searched = autopar.parallelize(lambda x, w: jnp.tanh(x @ w).sum())
step = autopar.parallelize(f3_training.step, plan=autopar.Plan.load(PLAN))
text = step.lower(*f3_training.arguments()).compile().as_text() or ""
refused, staged = "", autopar.PipelineParallel(2, 1)
try:
    kernels = [np.eye(8, dtype=np.float32)] * 2
    autopar.parallelize(tanh_chain, method=staged)(kernels, np.ones((8, 8), np.float32))
except NotImplementedError as error:
    refused = str(error)
found = {
    "refused": refused,
    "devices": [jax.local_device_count(), jax.device_count()],
    "sum": float(total(np.arange(64, dtype=np.float32))),
    "hlo": hashlib.sha256(without_source(text).encode()).hexdigest(),
    "losses": f3_training.losses(step),
    "searched": float(searched(np.ones((16, 64), np.float32), np.eye(64))),
    "solved": solved,
}
print("\n" + json.dumps(found))
