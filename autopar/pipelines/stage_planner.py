"""Plan the programs of one stage so that they suit each other.

Forward, planned alone, would split the batch and keep every parameter whole, as it
never sees a gradient. So forward and backward are first planned as one program: it says
where parameters, gradients and what comes in lie, and in what spec backward reads what
forward makes.
Each program is then planned for itself within that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..methods.restrictions import Limit, Restriction
from ..planner.intra_op import plan_intra_op
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.spec import REPLICATED, Spec, axes_of_dim, pending_axes
from .equal_programs import fingerprint, renamed


@dataclass
class StagePlanner:
    """Plans programs on submeshes of a cluster; equal ones once.

    `joint_gap` is enough for forward and backward as one, whose plan is not run.
    `limits_of` says what more a program is forbidden; such are planned every time.
    """

    cluster: Cluster
    joint_gap: float = 1e-4
    known: dict[Hashable, ShardingPlan] = field(default_factory=dict)
    limits_of: Callable[[OpGraph], Sequence[Limit]] | None = None

    def plan(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        pins: Mapping[int, Pin],
        returned: Mapping[int, Spec],
        split: Collection[int] = (),
        gap: float = 1e-4,
        demands: Sequence[Restriction] = (),
        cluster: Cluster | None = None,
    ) -> ShardingPlan:
        """The cheapest plan of a program.

        Arguments:
          pins: where arguments lie, by tensor.
          returned: the spec in which results are to be returned, by tensor.
          split: arguments that are to lie in as many parts as there are devices.
          demands: what its inside must be, where that has a name or rules.
          cluster: what the submesh is of, if that is another.
        """
        cluster = cluster or self.cluster
        limits = (*restrictions(graph, mesh, pins, returned, split), *demands)
        more = () if self.limits_of is None else self.limits_of(graph)
        key = (
            *(fingerprint(graph), mesh, cluster, gap, tuple(sorted(split))),
            tuple(sorted(pins.items(), key=itemgetter(0))),
            tuple(sorted(returned.items())),
            repr(demands),
        )
        if more or key not in self.known:
            found = plan_intra_op(
                graph,
                mesh,
                cluster,
                pins=pins,
                restrictions=(*limits, *more),
                gap=gap,
            )
            if not more:
                self.known[key] = found.plan
            return found.plan
        return renamed(self.known[key], graph)


def restrictions(
    graph: OpGraph,
    mesh: MeshShape,
    pins: Mapping[int, Pin],
    returned: Mapping[int, Spec],
    split: Collection[int],
) -> Sequence[Restriction]:
    """What a stage's programs leave to the solver."""
    wanted = {t: tuple(frozenset((s,)) for s in spec) for t, spec in returned.items()}
    homes = {
        t: (frozenset(range(graph.tensors[t].type.rank)),) * mesh.num_axes
        for t in split
        if t not in pins and graph.tensors[t].type.rank
    }
    if not wanted and not homes:
        return ()
    return (Restriction("the stage", {}, {}, homes, returned=wanted),)


def specs_read(plan: ShardingPlan, graph: OpGraph) -> dict[int, Spec]:
    """In which spec what forward makes is mostly read by backward, by tensor.

    `plan` is that of both as one program; no spec is pending.
    """
    reads: dict[int, Counter[Spec]] = {}
    phase_of = {
        t: "transpose(" in op.name for op in graph.operators() for t in op.results
    }
    for op, planned in zip(graph.operators(), plan.operators, strict=True):
        if "transpose(" not in op.name:
            continue
        for operand, spec in zip(op.operands, planned.operand_specs, strict=True):
            if not isinstance(operand, int) or phase_of.get(operand, True):
                continue
            if min(spec, default=0) >= REPLICATED:
                reads.setdefault(operand, Counter())[spec] += 1
    return {t: found.most_common(1)[0][0] for t, found in reads.items()}


def pin_of(spec: Spec, graph: OpGraph, tensor: int) -> Pin:
    """The pin that allows an argument one spec."""
    rank = graph.tensors[tensor].type.rank
    dims = tuple(axes_of_dim(spec, dim) for dim in range(rank))
    return Pin(dims, pending_axes(spec))
