"""State in the host's memory: where it lies, and how it comes and goes within a step.

What comes in is a `jax.device_put` in the program, outside of what is split; what goes
out is a result with a home on the host. JAX annotates both, and the compiler moves them
when they are read first, or made. Memory of CPU devices is the host's: there nothing
comes in, and only homes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..graph.op_graph import OpGraph
from ..plans.plan import ShardingPlan

HOST = "pinned_host"
DEVICE = "device"


@dataclass(frozen=True, eq=False)
class HostLeaves:
    """The positions of the arguments and of the results that lie on the host."""

    inputs: frozenset[int]
    outputs: frozenset[int]

    @classmethod
    def of(cls, graph: OpGraph, plan: ShardingPlan) -> HostLeaves:
        """Those of a plan; the next value of an argument lies where it lies."""
        inputs = {i for i, each in enumerate(plan.inputs) if each.memory == "host"}
        outputs = (graph.inputs[i].output for i in inputs)
        return cls(frozenset(inputs), frozenset(o for o in outputs if o is not None))

    def fetched(
        self, leaves: Sequence[Any], homes: Sequence[NamedSharding]
    ) -> list[Any]:
        """All arguments, those of the host on the devices; `homes` are all homes."""
        return [
            jax.device_put(leaf, home.with_memory_kind(DEVICE))
            if position in self.inputs
            else leaf
            for position, (leaf, home) in enumerate(zip(leaves, homes, strict=True))
        ]


def at_host(
    homes: Iterable[NamedSharding], positions: frozenset[int]
) -> tuple[NamedSharding, ...]:
    """The same homes, those at `positions` in the host's memory."""
    return tuple(
        home.with_memory_kind(HOST) if position in positions else home
        for position, home in enumerate(homes)
    )


def host_bytes(
    shardings: Iterable[NamedSharding], types: Iterable[jax.ShapeDtypeStruct]
) -> int:
    """Bytes that the host holds for one device of arguments with these homes."""
    found = 0
    for sharding, kind in zip(shardings, types, strict=True):
        if sharding.memory_kind == HOST:
            shape = sharding.shard_shape(kind.shape)
            found += jax.ShapeDtypeStruct(shape, kind.dtype).size * kind.dtype.itemsize
    return found
