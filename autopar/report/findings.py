"""What a report shows beside the plan itself, and what it could not find out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

from ..audit.audit import Audit
from ..clusters.cluster import Cluster
from ..planner.memory_users import MemoryUser
from ..planner.pin_costs import PinCost
from ..planner.reasons import Alternative
from ..plans.plan import MemoryShares

Section = Literal[
    "method", "seconds", "tasks", "memory", "alternatives", "pins", "audit"
]


@dataclass(frozen=True)
class MemoryCurve:
    """What one device holds while a program runs, point by point in executed order.

    Args:
      title: which device or program.
      base_bytes: what is held throughout, such as arguments and results.
      bytes: all that is held at each point.
      labels: what runs there.
      users: what is held at the peak, largest first.
    """

    title: str
    base_bytes: int
    bytes: tuple[int, ...]
    labels: tuple[str, ...]
    users: tuple[MemoryUser, ...]

    @property
    def peak(self) -> int:
        """The first point at which most is held."""
        return self.bytes.index(max(self.bytes))


@dataclass(frozen=True)
class Findings:
    """All that a plan does not hold itself.

    Args:
      method: what the plan was asked for, in words.
      cluster: prices collectives one by one.
      kinds: what an argument is, by path: `parameter`, `optimizer state` and the like.
      curves: memory over a step.
      tasks: when each task of a pipeline runs: events of a timeline (`runtime`).
      in_flight: by submesh, the most microbatches that it holds at once.
      alternatives: other plans of the step.
      pins: what each pin costs.
      audits: planned beside seen, by the name of the program.
      cautions: warnings that were given while the step was planned.
      missing: for a section that is empty, why, and how to fill it.
    """

    method: str = ""
    cluster: Cluster | None = None
    kinds: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    curves: tuple[MemoryCurve, ...] = ()
    tasks: tuple[Any, ...] = ()
    in_flight: tuple[int, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    pins: tuple[PinCost, ...] = ()
    audits: tuple[tuple[str, Audit], ...] = ()
    cautions: tuple[str, ...] = ()
    missing: Mapping[Section, str] = field(default_factory=lambda: MappingProxyType({}))


class PlanOrigin(Protocol):
    """The step that a plan is of, with its trace: where findings come from."""

    def findings(self, *, alternatives: bool, audit: bool) -> Findings:
        """All there is to find; what takes long only if it is asked for."""
        ...

    @property
    def batch(self) -> frozenset[str]:
        """The paths of the arguments that hold examples."""
        ...

    def memory(self) -> MemoryShares:
        """What a device holds at the peak; of a pipeline, the one that holds most."""
        ...


_WITHOUT_STEP = (
    "a plan file does not hold its step; call report on the plan that step.plan(...) "
    "returns, or give the command the step too: autopar report plan.json --target "
    "MODULE:NAME (--cluster FILE where that is no preset)."
)


def findings_of_file(cluster: Cluster | None) -> Findings:
    """What there is beside a plan that was read from a file, without its step."""
    sections: tuple[Section, ...] = get_args(Section)
    sections = tuple(each for each in sections if each != "seconds" or not cluster)
    return Findings(cluster=cluster, missing=dict.fromkeys(sections, _WITHOUT_STEP))
