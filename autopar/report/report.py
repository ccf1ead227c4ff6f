"""A report as data: all that is shown of a plan, before anything is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ..audit.audit import Audit
from ..clusters.cluster import Cluster, cluster_by_name
from ..costs.collectives import collective_seconds, priced_kind
from ..graph.work import is_heavy
from ..planner.explain_choice import WeighedChoice
from ..planner.reasons import Alternative
from ..plans.leaf_groups import LeafGroup, group_leaves
from ..plans.plan import TriedPlan
from ..plans.plan_view import (
    CollectiveView,
    Decision,
    LeafView,
    OperatorView,
    PlanView,
    ProgramView,
    format_source,
    grouped,
)
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec
from .answers import Answers
from .findings import (
    Findings,
    PlanOrigin,
    Section,
    findings_of_file,
)

MOST_LIGHT = 25  # lines of light operators of a program; the rest is one row
_NAMED = 3  # primitives of a line that are named
_KINDS = {"state": "state", "batch": "batch", "constant": "constants"}
_ORDER = ("parameters", "optimizer state", "state", "batch", "constants", "other")


@dataclass(frozen=True)
class ComputeLine:
    """The operators of one line that are split alike; seconds are of a step,
    and `part` of all compute.

    `spec` is that of their first result; None where they are light, and it differs.
    """

    program: str
    line: str
    operator: str
    mesh: MeshShape
    spec: Spec | None
    count: int
    seconds: float
    part: float = 0.0


@dataclass(frozen=True)
class SentLine:
    """The collectives of one kind, over the same axes, that one line asks for.

    Bytes are results of one device in a step; `seconds` are None where the links are
    not known.
    """

    program: str
    line: str
    collective: str
    axes: str
    mesh: MeshShape
    dtypes: str
    count: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Arguments:
    """The arguments of one kind, in groups that are split alike."""

    kind: str
    leaves: tuple[LeafView, ...]
    groups: tuple[LeafGroup[LeafView], ...]


@dataclass(frozen=True, eq=False)
class Report:
    """A plan, what is known beside it, and why its largest choices are as they are."""

    answers: Answers
    findings: Findings
    choices: tuple[WeighedChoice, ...] = ()

    @property
    def view(self) -> PlanView:
        """The plan."""
        return self.answers.view

    @property
    def cluster(self) -> Cluster | None:
        """Prices collectives one by one."""
        return self.findings.cluster

    @cached_property
    def arguments(self) -> tuple[Arguments, ...]:
        """By kind."""
        kinds = self.findings.kinds
        by_kind: dict[str, list[LeafView]] = {kind: [] for kind in _ORDER}
        for leaf in self.view.leaves:
            kind = kinds.get(leaf.path, _KINDS.get(leaf.role, "other"))
            by_kind.setdefault(kind, []).append(leaf)
        return tuple(
            Arguments(kind, tuple(leaves), group_leaves(leaves))
            for kind, leaves in by_kind.items()
            if leaves
        )

    @cached_property
    def compute(self) -> tuple[ComputeLine, ...]:
        """Where compute goes; what takes longest comes first."""
        lines = [line for p in self.view.programs for line in _compute_lines(p)]
        total = sum(line.seconds for line in lines) or 1.0
        lines = [replace(line, part=line.seconds / total) for line in lines]
        return tuple(sorted(lines, key=lambda line: -line.seconds))

    @cached_property
    def sent(self) -> tuple[SentLine, ...]:
        """All collectives; those that take longest (send most) come first."""
        lines = [
            _sent_line(same, self.cluster)
            for program in self.view.programs
            for same in grouped(program.collectives, _alike)
        ]
        return tuple(
            sorted(lines, key=lambda line: (-(line.seconds or 0), -line.bytes))
        )

    @property
    def is_priced(self) -> bool:
        """Whether every collective has its seconds."""
        return all(line.seconds is not None for line in self.sent)

    @property
    def sent_seconds(self) -> float:
        """Seconds of all collectives of a step, one after the other."""
        return sum(line.seconds or 0.0 for line in self.sent)

    @property
    def waited_seconds(self) -> float:
        """What of these the step waits for, as the plan has it, all stages together."""
        return sum(
            each.sharding.predicted.collective_seconds * each.times
            for each in self.view.programs
        )

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """What to know before the plan is trusted."""
        own = cautions(self.view.programs)
        return (*self.findings.cautions, *own)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """This plan and others, if there are others."""
        others = self.findings.alternatives
        return (
            (Alternative.of("this plan", self.view.decision), *others) if others else ()
        )


class StageAudits(Protocol):
    """The audits of a pipeline's programs, by name."""

    @property
    def audits(self) -> tuple[tuple[str, Audit], ...]: ...


def make_report(
    answers: Answers,
    origin: PlanOrigin | None,
    alternatives: bool | Mapping[str, Decision] = True,
    audit: bool | Audit | StageAudits = True,
    choices: Sequence[WeighedChoice] = (),
) -> Report:
    """The report of a plan; the arguments are those of `Plan.report`."""
    decision = answers.view.decision
    if origin is None:
        found = findings_of_file(cluster_by_name(decision.cluster))
    else:
        found = origin.findings(alternatives=alternatives is True, audit=audit is True)
    if not isinstance(alternatives, bool):
        plans = tuple(Alternative.of(n, plan) for n, plan in alternatives.items())
        found = _with(found, "alternatives", alternatives=plans)
    if not isinstance(audit, bool):
        audits = (("", audit),) if isinstance(audit, Audit) else audit.audits
        found = _with(found, "audit", audits=audits)
    others = [(each.title, each.plan) for each in found.alternatives]
    more = (TriedPlan(name, plan.predicted) for name, plan in others if plan)
    answers = replace(answers, tried=(*answers.tried, *more))
    return Report(answers, found, tuple(choices))


def write_page(text: str, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, target)


def _with(findings: Findings, section: Section, **values: object) -> Findings:
    """The findings with a section filled, which so is not missing."""
    missing = {k: v for k, v in findings.missing.items() if k != section}
    return replace(findings, missing=missing, **values)  # type: ignore[arg-type]


def _compute_lines(program: ProgramView) -> list[ComputeLine]:
    """Products by line and split; other operators by line, the least of them as one."""
    heavy = [op for op in program.operators if op.is_heavy]
    light = [op for op in program.operators if not op.is_heavy and op.seconds]
    by_line = grouped(light, lambda op: op.line)
    by_line.sort(key=lambda same: -sum(op.seconds for op in same))
    rest = [op for same in by_line[MOST_LIGHT:] for op in same]
    lines = [
        _compute_line(same, same[0].line, same[0].title, _spec(same[0]))
        for same in grouped(heavy, lambda op: (op.line, op.title, _spec(op)))
    ]
    for same in by_line[:MOST_LIGHT]:
        kinds = sorted({op.plan.kind for op in same})
        more = f" and {len(kinds) - _NAMED} more kinds" * (len(kinds) > _NAMED)
        words = f"{', '.join(kinds[:_NAMED])}{more}"
        lines.append(_compute_line(same, same[0].line, words, None))
    if rest:
        words = f"{len(by_line) - MOST_LIGHT} more lines"
        lines.append(_compute_line(rest, words, "light operators", None))
    return lines


def _compute_line(
    same: Sequence[OperatorView], line: str, operator: str, spec: Spec | None
) -> ComputeLine:
    program, seconds = same[0].program, sum(op.seconds for op in same)
    mesh = program.sharding.mesh
    return ComputeLine(program.name, line, operator, mesh, spec, len(same), seconds)


def _spec(op: OperatorView) -> Spec | None:
    return op.plan.result_specs[0] if op.plan.result_specs else None


def _alike(each: CollectiveView) -> tuple[str, str, str, str]:
    return each.line, each.plan.name, each.axes, each.marks


def _sent_line(same: Sequence[CollectiveView], cluster: Cluster | None) -> SentLine:
    first = same[0]
    mesh = first.program.sharding.mesh
    prices = [seconds_of(each, mesh, cluster) for each in same]
    known = [s * e.count for s, e in zip(prices, same, strict=True) if s is not None]
    return SentLine(
        first.program.name,
        first.line or "unknown",
        first.plan.name + (f" ({first.marks})" if first.marks else ""),
        first.axes,
        mesh,
        ", ".join(sorted({each.plan.dtype for each in same})),
        sum(each.count for each in same),
        sum(each.bytes for each in same),
        sum(known) if len(known) == len(same) else None,
    )


def seconds_of(
    each: CollectiveView, mesh: MeshShape, cluster: Cluster | None
) -> float | None:
    """Predicted seconds of one execution; None if the cluster is not the plan's."""
    if cluster is None or mesh.size > cluster.num_devices:
        return None
    names = each.axes.split(",")
    is_named = all(name in mesh.axis_names for name in names)
    link = cluster.link(mesh, names if is_named else mesh.axis_names)
    return float(collective_seconds(priced_kind(each.plan.kind), each.plan.bytes, link))


_MOST_NAMED = 5


def cautions(programs: Sequence[ProgramView]) -> tuple[str, ...]:
    """Sentences, one for each program of which devices repeat heavy work."""
    return tuple(_about_repeated_work(programs))


def _about_repeated_work(programs: Sequence[ProgramView]) -> Iterator[str]:
    for program in programs:
        plan, size = program.sharding, program.sharding.mesh.size
        repeated = [
            op for op in plan.operators if is_heavy(op.kind) and op.split < size
        ]
        if not repeated:
            continue
        lines = list(dict.fromkeys(format_source(op.source) for op in repeated))
        named = ", ".join(lines[:_MOST_NAMED])
        more = f" and {len(lines) - _MOST_NAMED} more" * (len(lines) > _MOST_NAMED)
        where = f"In {program.name}, " if program.name else ""
        share = 1 - plan.predicted.split_flops_fraction
        yield (
            f"{where}{share:.1%} of the heavy flops are done by several devices alike: "
            f"{named}{more}."
        )
