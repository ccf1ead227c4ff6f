"""One of several processes that train together from a checkpoint; prints JSON.

Run as `client_script.py FROM TO RANK NUM_PROCESSES PORT`; 8 virtual devices in all.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

FROM, TO = map(Path, sys.argv[1:3])
RANK, NUM_PROCESSES, PORT = map(int, sys.argv[3:6])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // NUM_PROCESSES)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}", NUM_PROCESSES, RANK, cluster_detection_method="deactivate"
)

from jax.experimental import multihost_utils  # noqa: E402

import autopar  # noqa: E402
from autopar.runtime import local  # noqa: E402
from tests.rows.test_checkpoints import (  # noqa: E402
    ABSTRACT,
    abstract_state,
    data,
    parallel,
    train,
)


class Examples:
    """Examples by number, which notes what is read."""

    def __init__(self) -> None:
        self.arrays, self.read = data(), list[int]()

    def __len__(self) -> int:
        return len(self.arrays["x"])

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return {name: array[number] for name, array in self.arrays.items()}


def error_of(call: Any) -> str:
    """What a call raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_all(name: str, value: Any, mesh: str) -> Any:
    def fun(x: jax.Array) -> jax.Array:
        return x.sum()

    fun.__name__ = name
    return autopar.parallelize(fun, mesh=mesh)(value)


step = parallel("ZeRO")
with (
    autopar.Checkpoints(FROM) as checkpoints,
    warnings.catch_warnings(record=True) as w,
):
    warnings.simplefilter("always")
    found = checkpoints.restore(abstract_state(step))
    said = [str(each.message) for each in w if "was restored" in str(each.message)]

source = Examples()
lowered = step.lower(abstract_state(step), ABSTRACT)
batches = autopar.Batches(
    source, lowered, seed=5, position=found.data_position, prefetch=0
)
state, losses = train(step, found.state, batches, 2)
with autopar.Checkpoints(TO) as checkpoints:
    checkpoints.save(found.step + 2, state, data_position=batches.position)
autopar.export_weights(TO / "weights.safetensors", state[0])

kernel, values = state[0][0], np.ones(8, "f4")
read_there = (
    error_of(lambda: np.asarray(kernel)),
    error_of(lambda: autopar.fetch(state)),
)
mesh = ("data:8", "data:4;model:2")[RANK % 2]
differs = error_of(lambda: of_all("differing", values, mesh))
local.TIMEOUT_SECONDS = 2.0
alone = error_of(lambda: of_all("alone", values, "data:8")) if RANK == 0 else ""
multihost_utils.sync_global_devices("the first process waited")
print(
    "\n"
    + json.dumps(
        {
            "step": found.step,
            "said": said,
            "losses": losses,
            "read": source.read,
            "read there": read_there,
            "differs": differs,
            "alone": alone,
            "left": sorted(path.name for path in TO.iterdir()),
        }
    )
)
