"""The collectives of a step by the source line that asks for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..clusters.cluster import Cluster
from ..costs.collectives import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    collective_seconds,
)
from ..plans.explain import format_source, line_of
from ..plans.plan import ShardingPlan
from ..sharding.collective import Collective
from ..sharding.group_names import GroupNames
from ..sharding.mesh import MeshShape


@dataclass(frozen=True)
class CollectiveLine:
    """All collectives of one kind, over the same axes, that one line asks for.

    Args:
      program: the stage program that they are in, or nothing.
      source: the line, as the trace has it.
      collective: kind and reduction.
      axes: the mesh axes they run over, with commas, or the devices if none fit.
      mesh: the mesh.
      dtypes: what is sent.
      count: executions a step.
      bytes: result bytes of one device in a step.
      seconds: of a step; None where the links are not known.
      marks: `conditional`, `unbounded`.
    """

    program: str
    source: str
    collective: str
    axes: str
    mesh: MeshShape
    dtypes: str
    count: int
    bytes: int
    seconds: float | None
    marks: str


@dataclass(frozen=True)
class Program:
    """A plan of one program, how often it runs in a step, and what it is called."""

    name: str
    plan: ShardingPlan
    times: int


def collective_lines(
    programs: Iterable[Program], cluster: Cluster | None
) -> tuple[CollectiveLine, ...]:
    """The lines of all programs, those that take longest (send most) first."""
    lines = [line for program in programs for line in _lines(program, cluster)]
    return tuple(sorted(lines, key=lambda line: (-(line.seconds or 0.0), -line.bytes)))


def seconds_of(
    each: Collective, mesh: MeshShape, axes: str, cluster: Cluster
) -> float | None:
    """Predicted seconds of one execution; None if the cluster is not the plan's."""
    if mesh.size > cluster.num_devices:
        return None
    names = axes.split(",")
    is_named = all(name in mesh.axis_names for name in names)
    link = cluster.link(mesh, names if is_named else mesh.axis_names)
    kind: CollectiveKind = "collective_permute"
    for known in COLLECTIVE_KINDS:
        kind = known if known == each.kind else kind
    return collective_seconds(kind, each.bytes, link)


def _lines(program: Program, cluster: Cluster | None) -> Iterator[CollectiveLine]:
    plan = program.plan
    lines = {op.source for op in plan.operators if op.source}
    names = GroupNames(plan.mesh.size, plan.mesh)
    grouped: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for each in plan.collectives:
        marks = " ".join(
            word for word in ("conditional", "unbounded") if getattr(each, word)
        )
        axes = names.name(each.kind, each.groups)
        line = format_source(line_of(each, lines))
        grouped[line, each.name, axes, marks].append(each)
    for (_, collective, axes, marks), same in grouped.items():
        seconds: list[float | None] = [None] * len(same)
        if cluster is not None:
            seconds = [seconds_of(each, plan.mesh, axes, cluster) for each in same]
        known = [s * c.count for s, c in zip(seconds, same, strict=True) if s]
        yield CollectiveLine(
            program.name,
            line_of(same[0], lines),
            collective,
            axes,
            plan.mesh,
            ", ".join(sorted({each.dtype for each in same})),
            sum(each.count for each in same) * program.times,
            sum(each.total_bytes for each in same) * program.times,
            sum(known) * program.times if None not in seconds else None,
            marks,
        )
