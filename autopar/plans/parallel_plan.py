"""What `step.plan(...)` returns: a plan to read, keep, compare and run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import explain as _explain
from . import explain_stages as _explain_stages
from . import plan_file as _plan_file
from . import staged_plan_file as _staged_plan_file
from .plan import Prediction, ShardingPlan
from .staged_plan import StagedPlan


@dataclass(frozen=True)
class Plan:
    """The decision for a whole function, with what it will cost.

    `predicted` comes from the plan and the cost model alone; `parallelize(plan=...)`
    runs the plan as it is. `decision` is one `ShardingPlan`, or that of a pipeline.
    """

    decision: ShardingPlan | StagedPlan

    @property
    def sharding(self) -> ShardingPlan:
        """How one program is split over the mesh.

        Raises:
          TypeError: the plan is that of a pipeline, which has one for each program.
        """
        if isinstance(self.decision, StagedPlan):
            raise TypeError(
                f"A plan of one program has a sharding, but that of "
                f"{self.decision.function!r} is a pipeline of "
                f"{self.decision.num_stages} stages; use plan.stages.programs."
            )
        return self.decision

    @property
    def stages(self) -> StagedPlan:
        """The stages of a pipeline: their programs, submeshes and transfers.

        Raises:
          TypeError: the plan is of one program.
        """
        if isinstance(self.decision, ShardingPlan):
            raise TypeError(
                f"A plan of a pipeline has stages, but that of "
                f"{self.decision.function!r} is one program; use plan.sharding."
            )
        return self.decision

    @property
    def predicted(self) -> Prediction:
        """Seconds, bytes, memory and optimality gap of a step."""
        return self.decision.predicted

    def explain(self, *, operators: bool = False) -> None:
        """Print the plan: specs of tensors, collectives by source line, cost and gap.

        Args:
          operators: print the strategy of every operator too, not only of heavy ones.
        """
        if isinstance(self.decision, StagedPlan):
            _explain_stages.print_plan(self.decision, operators=operators)
        else:
            _explain.print_plan(self.decision, operators=operators)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        if isinstance(self.decision, StagedPlan):
            text = _staged_plan_file.to_json(self.decision)
        else:
            text = _plan_file.to_json(self.decision)
        Path(path).write_text(text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
          PlanFileError: the file is no plan, truncated, or of another version.
        """
        text, where = Path(path).read_text(), str(path)
        if _staged_plan_file.is_staged(text):
            return cls(_staged_plan_file.from_json(text, where))
        return cls(_plan_file.from_json(text, where))

    def __str__(self) -> str:
        if isinstance(self.decision, StagedPlan):
            return _explain_stages.format_plan(self.decision)
        return _explain.format_plan(self.decision)
