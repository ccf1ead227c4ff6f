"""A process that compiles for devices that are not here; runs as a script.

Reads requests from its standard input and writes replies to its standard output, each
behind its length in eight bytes: pickled dicts, and JSON. It imports jax and nothing of
autopar.
"""

import json
import os
import pickle
import sys
import time
from typing import Any


def compile_request(request: dict[str, Any], topologies: dict[Any, Any]) -> Any:
    """Compile one exported program; `compile_service.compile_for` makes requests."""
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    names, sizes = request["axis_names"], request["axis_sizes"]
    devices = np.empty(int(np.prod(sizes)), object)
    devices[:] = devices_of(request, topologies)[: len(devices)]
    kinds = (AxisType.Auto,) * len(names)
    mesh = Mesh(devices.reshape(sizes), names, axis_types=kinds)

    def on_mesh(placed: tuple[Any, str | None] | None) -> NamedSharding | None:
        if placed is None:  # the partitioner's choice
            return None
        spec, memory = placed
        return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory)

    exported = export.deserialize(bytearray(request["code"]))

    def call(constants: Any, *leaves: Any) -> Any:
        return exported.call(constants, *leaves)

    call.__name__ = request["name"]
    jitted = jax.jit(
        call,
        in_shardings=(
            tuple(map(on_mesh, request["constants"])),
            *map(on_mesh, request["inputs"]),
        ),
        out_shardings=[on_mesh(each) for each in request["outputs"]],
        donate_argnums=tuple(1 + position for position in request["donated"]),
    )
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    start = time.perf_counter()
    compiled = jitted.lower(*arguments).compile(request["options"])
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    sizes_of = {n: getattr(memory, n) for n in dir(memory) if n.endswith("_in_bytes")}
    return {
        "text": compiled.as_text(),
        "memory": sizes_of,
        "cost": dict(compiled.cost_analysis() or {}),
        "seconds": seconds,
    }


def devices_of(request: dict[str, Any], known: dict[Any, Any]) -> list[Any]:
    """The devices of a request's topology in order, those of TPUs at its places."""
    from jax.experimental.topologies import get_topology_desc

    key = request["platform"], request["topology"]
    if key not in known:
        described = get_topology_desc(platform=key[0], **dict(request["topology"]))
        known[key] = described.devices
    if request["places"] is None:
        return known[key]
    at = {}
    for device in known[key]:
        slice_number = getattr(device, "slice_index", None) or 0
        chip = tuple(device.coords)[: len(request["places"][0]) - 2]
        at[slice_number, *chip, device.core_on_chip] = device
    return [at[tuple(place)] for place in request["places"]]


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    requests, topologies = sys.stdin.buffer, {}
    while length := requests.read(8):
        request = pickle.loads(requests.read(int.from_bytes(length)))
        try:
            reply = compile_request(request, topologies)
        except Exception as error:  # whatever it is, it is the asker's to handle
            reply = {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(reply).encode()
        replies.write(len(body).to_bytes(8) + body)
        replies.flush()


if __name__ == "__main__":
    main()
