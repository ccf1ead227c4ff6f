"""A report as data: all that is shown of a plan, before anything is drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..audit.audit import Audit
from ..plans.plan import ShardingPlan
from ..plans.plan_view import PlanView
from ..plans.staged_plan import StagedPlan
from .cautions import cautions
from .collective_lines import CollectiveLine, collective_lines
from .compute_lines import ComputeLine, compute_lines
from .device_grid import DeviceGrid, device_grids
from .findings import (
    Alternative,
    Decision,
    Findings,
    PlanOrigin,
    Section,
    cluster_by_name,
    findings_of_file,
)
from .leaf_tree import Branch, leaf_tree, leaves_of_plan, leaves_of_stages
from .task_times import TaskTimes, task_times


@dataclass(frozen=True)
class Report:
    """What is shown, section by section; `times` is None where there are no stages."""

    decision: Decision
    findings: Findings
    grids: tuple[DeviceGrid, ...]
    times: TaskTimes | None
    trees: tuple[Branch, ...]
    compute: tuple[ComputeLine, ...]
    collectives: tuple[CollectiveLine, ...]
    cautions: tuple[str, ...]

    @property
    def is_priced(self) -> bool:
        """Whether every collective has its seconds."""
        return all(line.seconds is not None for line in self.collectives)

    @property
    def sent_seconds(self) -> float:
        """Seconds of all collectives of a step, one after the other."""
        return sum(line.seconds or 0.0 for line in self.collectives)

    @property
    def waited_seconds(self) -> float:
        """What of these the step waits for, as the plan has it, all stages together."""
        programs = PlanView(self.decision).programs
        return sum(
            each.sharding.predicted.collective_seconds * each.times for each in programs
        )


class StageAudits(Protocol):
    """The audits of a pipeline's programs, by name."""

    @property
    def audits(self) -> tuple[tuple[str, Audit], ...]: ...


GivenAudit = bool | Audit | StageAudits
GivenPlans = bool | Mapping[str, Decision]


def make_report(
    decision: Decision,
    origin: PlanOrigin | None,
    alternatives: GivenPlans = True,
    audit: GivenAudit = True,
) -> Report:
    """The report of a plan; the arguments are those of `Plan.report`."""
    wants_plans, wants_audit = alternatives is True, audit is True
    if origin is None:
        found = findings_of_file(cluster_by_name(decision.cluster))
    else:
        found = origin.findings(alternatives=wants_plans, audit=wants_audit)
    if not isinstance(alternatives, bool):
        plans = tuple(alternative(n, plan) for n, plan in alternatives.items())
        found = _with(found, "alternatives", alternatives=plans)
    if not isinstance(audit, bool):
        audits = (("", audit),) if isinstance(audit, Audit) else audit.audits
        found = _with(found, "audit", audits=audits)
    return report_of(decision, found)


def report_of(decision: Decision, findings: Findings) -> Report:
    """The report of a plan and what is known beside it."""
    programs, cluster = PlanView(decision).programs, findings.cluster
    if isinstance(decision, StagedPlan):
        leaves = leaves_of_stages(decision, findings.kinds)
        names = [_submesh_name(decision, i) for i in range(len(decision.meshes))]
        grids = device_grids(decision.meshes, cluster, names)
        times = task_times(decision, cluster)
    else:
        leaves = leaves_of_plan(decision, findings.kinds)
        grids = device_grids([decision.mesh], cluster, ["the mesh"])
        times = None
    return Report(
        decision,
        findings,
        grids,
        times,
        leaf_tree(leaves),
        compute_lines(programs),
        collective_lines(programs, cluster),
        (*findings.cautions, *cautions(decision, programs)),
    )


def alternative(name: str, decision: Decision) -> Alternative:
    """A plan as an alternative to another."""
    is_one = isinstance(decision, ShardingPlan)
    meshes = [decision.mesh] if is_one else decision.meshes
    return Alternative(name, " | ".join(map(str, meshes)), decision.predicted)


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


def _submesh_name(plan: StagedPlan, submesh: int) -> str:
    stages = [s for s in range(plan.num_stages) if s % len(plan.meshes) == submesh]
    word = "stage" if len(stages) == 1 else "stages"
    return f"submesh {submesh}: {word} {', '.join(map(str, stages))}"
