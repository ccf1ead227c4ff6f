"""What `step.plan(...)` returns: a plan to read, keep, compare and run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jax.sharding import Mesh

from ..clusters.cluster import cluster_by_name
from ..planner.explain_choice import choice_parts, largest_choices
from ..planner.pin_costs import PinCosts
from ..planner.reasons import PlanShardings, PlanSource
from ..planner.traced_step import TracedStep
from ..plans import explain as _explain
from ..plans.plan import Prediction, ShardingPlan, TriedPlan
from ..plans.plan_diff import PlanDiff, diff_plans
from ..plans.plan_file import read_plan, to_json
from ..plans.plan_view import PlanView
from ..plans.staged_plan import StagedPlan, sharding_of, stages_of
from ..report.answers import Answers
from ..report.compiled_figures import CompiledFigures
from ..sharding.pins import PinsLike

if TYPE_CHECKING:
    from ..audit.audit import Audit
    from ..report.findings import PlanOrigin
    from ..report.report import StageAudits

WHAT_IF_GAP = 0.01  # of a step: closing it further takes most of the time of solving


@dataclass(frozen=True, repr=False)
class Plan:
    """The decision for a whole function, with what it will cost.

    `predicted` comes from the plan and the cost model alone; `parallelize(plan=...)`
    runs the plan as it is. `decision` is one `ShardingPlan`, or that of a pipeline.
    `origin` is the step it is of, with its trace: only plans of `step.plan` know it,
    and it is neither saved nor copied to other processes. `source` plans that step
    again under other conditions, and comes and goes with it. `compiled` is what the
    compiler of its devices made of it, or why that is not known; `tried` are other
    plans that were made while it was looked for. Both are left out of files, too.
    """

    decision: ShardingPlan | StagedPlan
    origin: PlanOrigin | None = field(default=None, compare=False)
    source: PlanSource | None = field(default=None, compare=False)
    compiled: CompiledFigures | str = field(default="", compare=False)
    tried: tuple[TriedPlan, ...] = field(default=(), compare=False)

    def __reduce__(self) -> tuple[type[Plan], tuple[ShardingPlan | StagedPlan]]:
        return Plan, (self.decision,)

    @property
    def sharding(self) -> ShardingPlan:
        """How one program is split over the mesh.

        Raises:
          TypeError: the plan is that of a pipeline, which has one for each program.
        """
        return sharding_of(self.decision)

    @property
    def stages(self) -> StagedPlan:
        """The stages of a pipeline: their programs, submeshes and transfers.

        Raises:
          TypeError: the plan is of one program.
        """
        return stages_of(self.decision)

    @property
    def predicted(self) -> Prediction:
        """Seconds, bytes, memory and optimality gap of a step."""
        return self.decision.predicted

    def explain(
        self,
        *,
        tensor: str | None = None,
        op: str | None = None,
        operators: bool = False,
    ) -> None:
        """Print the plan: specs of tensors, collectives by source line, cost and gap.

        Args:
          tensor: print instead why this tensor is made as it is: what made it so, the
            runner-up and its price. A path as the plan prints it (`params['w']`, or
            `params/w`), or the name of the operator that makes it.
          op: the same of an operator, by its name in the plan.
          operators: print the strategy of every operator too, not only of heavy ones.

        Raises:
          ValueError: nothing has that name; names what is like it.
        """
        if tensor is not None or op is not None:
            given = self.decision, self.source
            parts = []
            if tensor is not None:
                parts += choice_parts("tensor", tensor, *given)
            if op is not None:
                parts += choice_parts("op", op, *given)
            _explain.show(parts)
        else:
            parts = _explain.plan_parts(self.decision, operators, self.answers.rows)
            _explain.show(parts)
        if isinstance(self.compiled, CompiledFigures):
            _explain.show(self.compiled.parts())
        elif self.compiled:
            _explain.show([self.compiled])

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        alternatives: bool | Mapping[str, Plan] = True,
        audit: bool | Audit | StageAudits = True,
    ) -> None:
        """Write the plan as one HTML file, which opens in a browser without a network.

        A plan that was loaded from a file has no trace: the report then shows what the
        file has, and says what is missing and how to get it.

        Args:
          path: the file to write.
          alternatives: other plans to compare with, by name. True solves the step for
            every named method and without each pin, which takes as long as planning
            did for each; False leaves that out.
          audit: what `step.lower(...).compile().audit()` returned. True compiles the
            step, unless it was planned with `compile=True`, if this process has as
            many devices; False leaves that out.

        Raises:
          ImportError: plotly is not installed.
        """
        from ..report.page import page_of
        from ..report.report import make_report, write_page

        given, choices = alternatives, ()
        if not isinstance(given, bool):
            given = {name: plan.decision for name, plan in given.items()}
        elif given:
            choices = largest_choices(self.decision, self.source)
        if audit is True and isinstance(self.compiled, CompiledFigures):
            audit = self.compiled.named()
        found = make_report(self.answers, self.origin, given, audit, tuple(choices))
        write_page(page_of(found), path)

    def shardings(self, mesh: Mesh | None = None) -> PlanShardings:
        """Where arguments and results lie, for a step that stays with `jax.jit`.

        `jax.jit(step, in_shardings=found.arguments, out_shardings=found.results)` runs
        it; what it does inside is then the compiler's. What the plan has in the host's
        memory is on devices here, as jit moves nothing for a step.

        Args:
          mesh: a mesh with the plan's axes; that of the step, or the devices of this
            process, if left out.

        Raises:
          TypeError: the plan is that of a pipeline.
          ValueError: the plan was loaded, or jit has no such arguments.
        """
        decision = self.sharding
        if not isinstance(self.source, TracedStep):
            self._no_step()
        return self.source.shardings(decision, mesh)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to another, which prints as tables.

        Leaves are told apart by path, operators and collectives by source line.
        """
        return diff_plans(self.decision, other.decision)

    def what_if(self, pins: PinsLike, *, gap: float = WHAT_IF_GAP) -> Plan:
        """The plan of the same step on the same mesh, with more pins.

        `print(plan.diff(plan.what_if(pins)))` shows what the pins do; the result can be
        asked again, and runs as `parallelize(step, plan=)`. Nothing is traced again,
        but for a pipeline, whose stages stay where they are cut.

        Args:
          pins: as those of `parallelize`; they come before those of the plan itself.
          gap: how much more than the best plan with the pins it may take, as a part of
            the step. Steps are planned to 0.0001, which takes longer; so are stages
            of pipelines. A plan that has the pins already is returned as it is.

        Raises:
          InfeasiblePlanError: no plan has these pins.
          ValueError: a pin matches nothing or cannot be, or the plan was loaded.
        """
        if not gap >= 0:
            raise ValueError(
                f"`gap` must be a part of a step from 0 up, but got {gap}; 0.01 takes "
                f"about a second."
            )
        asked = self.source or self._no_step()
        made, source = asked.what_if(self.decision, pins, gap)
        return Plan(made, source=source)

    def pin_costs(self) -> PinCosts:
        """What each pin adds to a step, which is planned again without it.

        Of a pipeline, what `autopar.pin` asks for inside the step is not priced.

        Raises:
          ValueError: the plan was loaded.
        """
        return (self.source or self._no_step()).pin_costs(self.decision)

    def _no_step(self) -> NoReturn:
        raise ValueError(
            f"A plan can be solved again if its step is at hand, but that of "
            f"{self.decision.function!r} was loaded; ask the plan of "
            f"parallelize(step, plan=plan).plan(...), which has both."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(to_json(self.decision))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
          PlanFileError: the file is no plan, truncated, or of another version.
        """
        return cls(read_plan(Path(path).read_text(), str(path)))

    @property
    def answers(self) -> Answers:
        """Whether it fits, how quick it is, what holds memory, what could be better."""
        cluster, memory, batch = None, None, frozenset[str]()
        if isinstance(self.source, TracedStep):
            cluster, memory = self.source.cluster, self.source.memory(self.sharding)
        elif self.origin is not None:
            memory, batch = self.origin.memory(), self.origin.batch
        cluster = cluster or cluster_by_name(self.decision.cluster)
        view = PlanView(self.decision)
        return Answers(view, cluster, memory, self.compiled, self.tried, batch)

    def __str__(self) -> str:
        parts = _explain.plan_parts(self.decision, False, self.answers.rows)
        return _explain.as_text(parts)

    def __repr__(self) -> str:
        summary = _explain.format_summary(self.decision, self.answers.rows)
        return f"<{summary}\nprint(plan) shows all of it>"

    def _repr_html_(self) -> str:
        return _explain.plan_html(self.decision, self.answers.rows)
