"""One program in all processes of `jax.distributed`: differences are errors, not hangs.

Process 0 plans for all (`planner/shared_plan.py`). Before a program that spans several
processes is compiled, each tells the others through JAX's key-value store what it is
about to run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.lowering.programs import SpmdProgram, distributed_store

TIMEOUT_SECONDS = 300.0  # for the slowest process to plan
_NUMBERS = itertools.count()  # all processes make their programs in one order


def check_clients(program: SpmdProgram) -> None:
    """Does nothing if the other processes that a program spans have the same one.

    Raises:
      RuntimeError: one has another mesh or program; says what each has.
      TimeoutError: one did not come to this point.
    """
    store, mesh = distributed_store(), program.mesh
    if store is None or not isinstance(mesh, Mesh):
        return
    clients = sorted({device.process_index for device in mesh.devices.flat})
    if len(clients) == 1:
        return
    name, number = program.jitted.__name__, next(_NUMBERS)

    def key(client: int) -> str:
        return f"autopar/program/{number}/{client}"

    ours = _described(program, mesh)
    store.key_value_set(key(jax.process_index()), json.dumps(ours))
    found: dict[int, dict[str, Any]] = {}
    for client in clients:
        try:
            text = store.blocking_key_value_get(key(client), int(TIMEOUT_SECONDS * 1e3))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"All processes of a mesh must run {name}, but process {client} did "
                f"not come to it in {TIMEOUT_SECONDS:g} s; see what it says, and let "
                f"all call the same functions in the same order."
            ) from error
        found[client] = json.loads(text)
    if any(each != ours for each in found.values()):
        shown = "; ".join(
            f"process {client} has {each['name']} on mesh {each['mesh']}, program "
            f"{each['program'][:8]}, devices {each['devices'][:8]}"
            for client, each in found.items()
        )
        raise RuntimeError(
            f"All processes of a mesh must run one program, but they differ: {shown}. "
            f"Give all the same functions, options and versions; or plan once, keep "
            f"it with plan.save(...), and give all that plan."
        )


def _described(program: SpmdProgram, mesh: Mesh) -> dict[str, str]:
    """What must be equal: names to be read, and digests."""
    ids = np.array([device.id for device in mesh.devices.flat])
    return {
        "name": program.jitted.__name__,
        "mesh": ";".join(f"{axis}:{size}" for axis, size in mesh.shape.items()),
        "program": hashlib.sha256(program.lower().as_text().encode()).hexdigest(),
        "devices": hashlib.sha256(ids.tobytes()).hexdigest(),
    }
