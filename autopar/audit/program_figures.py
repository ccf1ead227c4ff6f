"""What a compiler makes of a step on one device: its memory, its messages, its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..costs.collectives import wire_bytes
from ..lowering.memory_use import MemoryUse
from ..sharding.collective import Collective, CollectiveKind
from .compiled_collectives import collectives_in_compiled
from .replay import Replay, replay_if_known

if TYPE_CHECKING:
    from ..clusters.cluster import Cluster
    from ..sharding.mesh import MeshShape


@dataclass(frozen=True)
class ProgramFigures:
    """A compiled program, in bytes of one device and seconds of one step.

    Attributes:
      device_bytes: what it holds: arguments, results and temporaries.
      collectives: those that move anything.
      compile_seconds: what compiling took; 0 for devices of this process.
      replayed: how long a step takes; None where that is not known, as on CPUs.
    """

    device_bytes: int
    collectives: tuple[Collective, ...]
    compile_seconds: float
    replayed: Replay | None = None

    @staticmethod
    def of(
        compiled: Any,
        cluster: Cluster | None = None,
        mesh: MeshShape | None = None,
        host_bytes: int = 0,
    ) -> ProgramFigures:
        """Of a `jax.stages.Compiled`, or of a target's program.

        Replayed are those for GPUs and TPUs of a `cluster`, on the devices of a `mesh`.
        """
        text = compiled.as_text()
        found = collectives_in_compiled(text)
        moving = tuple(each for each in found if not each.is_trivial)
        return ProgramFigures(
            MemoryUse.of(compiled, host_bytes).device_bytes,
            moving,
            getattr(compiled, "compile_seconds", 0.0),
            replay_if_known(text, cluster, mesh),
        )

    @property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """Result bytes of all collectives of a kind, in a step."""
        found: Counter[str] = Counter()
        for each in self.collectives:
            found[each.kind] += each.total_bytes
        return dict(found.most_common())

    @property
    def sent_bytes(self) -> float:
        """What the device sends in a step, where collectives are rings."""
        return sum(
            wire_bytes(
                cast("CollectiveKind", each.kind), each.total_bytes, len(each.groups[0])
            )
            for each in self.collectives
        )
