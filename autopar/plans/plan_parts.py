"""What two plans are compared by: where leaves lie, how operators split, what is sent.

The same view of a plan of one program and of one of a pipeline, whose operators and
collectives count as often as their program runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..costs.compute import is_heavy
from ..graph.op_graph import Role
from ..sharding.group_names import GroupNames
from ..sharding.mesh import MeshShape
from ..sharding.spec import format_spec
from .explain import line_of, split_words
from .plan import OperatorPlan, Prediction, ShardingPlan
from .staged_plan import StagedPlan

Decision = ShardingPlan | StagedPlan

# What a stage program takes is an argument, a sum over microbatches, or the result of
# an operator, whose name ends in a number as no path does.
_BETWEEN_PROGRAMS = re.compile(r"^sum of |\.\d+(:\d+)?$")


@dataclass(frozen=True)
class LeafPart:
    """An argument: how it lies, as text."""

    path: str
    role: Role
    shape: tuple[int, ...]
    spec: str
    bytes: int


@dataclass(frozen=True)
class OperatorPart:
    """One operator; `name` has the stage program it is in, `splits` its result."""

    name: str
    kind: str
    phase: str
    source: str
    splits: str
    seconds: float

    @property
    def is_heavy(self) -> bool:
        """Whether it is a product or a convolution."""
        return is_heavy(self.kind)


@dataclass(frozen=True)
class TrafficPart:
    """A collective: its tensor and source line, and count and bytes of a step."""

    tensor: str
    source: str
    collective: str
    axes: str
    count: int
    bytes: int


@dataclass(frozen=True)
class PlanParts:
    """A plan as `PlanDiff` reads it."""

    decision: Decision
    leaves: dict[str, LeafPart]
    operators: tuple[OperatorPart, ...]
    traffic: tuple[TrafficPart, ...]

    @property
    def predicted(self) -> Prediction:
        """Seconds and bytes of a step."""
        return self.decision.predicted

    @property
    def state_bytes(self) -> int:
        """Bytes of state on one device; of a pipeline, on the one that has most."""
        if isinstance(self.decision, ShardingPlan):
            return self.decision.state_bytes()
        held = [0] * len(self.decision.meshes)
        for each in self.decision.programs:
            if each.kind == "apply":
                held[each.stage % len(held)] += each.sharding.state_bytes()
        return max(held)

    @property
    def meshes(self) -> str:
        """The mesh, or those of the stages."""
        if isinstance(self.decision, ShardingPlan):
            return str(self.decision.mesh)
        return " | ".join(map(str, self.decision.meshes))

    @property
    def form(self) -> str:
        """One program with what it makes again, or how a pipeline is cut."""
        plan = self.decision
        if isinstance(plan, ShardingPlan):
            remat = f", remat {plan.remat}" if plan.remat else ""
            return f"one program{remat}"
        return (
            f"{plan.num_stages} stages, {plan.num_microbatches} microbatches, "
            f"{plan.schedule}"
        )


def parts_of(decision: Decision) -> PlanParts:
    """The parts of a plan."""
    operators: list[OperatorPart] = []
    traffic: list[TrafficPart] = []
    for where, plan, times in _programs(decision):
        operators += (_operator(op, plan.mesh, where, times) for op in plan.operators)
        traffic += _traffic(plan, where, times)
    return PlanParts(
        decision, _leaves(_programs(decision)), tuple(operators), tuple(traffic)
    )


def decision_only(decision: Decision) -> Decision:
    """The plan without what it costs, and without names of files and lines.

    Plans that are equal so run the same program, whatever they were predicted to take.
    """
    nothing = Prediction(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0)
    if isinstance(decision, StagedPlan):
        return replace(
            decision,
            function="",
            cluster="",
            predicted=nothing,
            peak_bytes=(),
            programs=tuple(
                replace(each, sharding=decision_only(each.sharding))
                for each in decision.programs
            ),
        )
    return replace(
        decision,
        function="",
        cluster="",
        predicted=nothing,
        collectives=(),
        operators=tuple(
            replace(op, source="", flops=0.0, seconds=0.0) for op in decision.operators
        ),
    )


def _programs(decision: Decision) -> Iterator[tuple[str, ShardingPlan, int]]:
    """Each program: what to call it, its plan, and how often it runs in a step."""
    if isinstance(decision, ShardingPlan):
        yield "", decision, 1
        return
    for each in decision.programs:
        where = f"stage {each.stage} {each.kind}"
        yield where, each.sharding, decision.times(each)


def _leaves(programs: Iterable[tuple[str, ShardingPlan, int]]) -> dict[str, LeafPart]:
    """By path; a leaf that several stages have says so of each."""
    found: dict[str, list[tuple[str, LeafPart]]] = {}
    for where, plan, _ in programs:
        stage = where.rpartition(" ")[0]
        for each in plan.inputs:
            if stage and _BETWEEN_PROGRAMS.search(each.path):
                continue
            spec = format_spec(each.spec, len(each.shape), plan.mesh.axis_names)
            if each.memory != "device":
                spec += f" in the {each.memory}'s memory"
            leaf = LeafPart(each.path, each.role, each.shape, spec, each.bytes)
            found.setdefault(each.path, []).append((stage, leaf))
    return {path: _joined(leaves) for path, leaves in found.items()}


def _joined(leaves: list[tuple[str, LeafPart]]) -> LeafPart:
    first = leaves[0][1]
    if not leaves[0][0]:
        return first
    specs = sorted({f"{stage} {leaf.spec}" for stage, leaf in leaves})
    is_state = any(leaf.role == "state" for _, leaf in leaves)
    return replace(
        first,
        spec=", ".join(specs),
        role="state" if is_state else first.role,
        bytes=max(leaf.bytes for _, leaf in leaves),
    )


def _operator(
    op: OperatorPlan, mesh: MeshShape, where: str, times: int
) -> OperatorPart:
    return OperatorPart(
        f"{where} {op.name}".strip(),
        op.kind,
        " (backward)" if "transpose(" in op.name else "",
        op.source,
        split_words(op.result_specs[0], mesh.axis_names) if op.result_specs else "",
        op.seconds * times,
    )


def _traffic(plan: ShardingPlan, where: str, times: int) -> Iterator[TrafficPart]:
    names = GroupNames(plan.mesh.size, plan.mesh)
    lines = {op.source for op in plan.operators if op.source}
    for each in plan.collectives:
        source = line_of(each, lines)
        tensor = each.source.removesuffix(source).strip()
        yield TrafficPart(
            f"{where} {tensor}".strip(),
            source if source != tensor else "",
            each.name,
            names.name(each.kind, each.groups),
            each.count * times,
            each.total_bytes * times,
        )
