"""What `step.plan(...)` returns: a plan to read, keep, compare and run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import explain as _explain
from . import plan_file as _plan_file
from .plan import Prediction, ShardingPlan


@dataclass(frozen=True)
class Plan:
    """The decision for a whole function, with what it will cost.

    `predicted` comes from the plan and the cost model alone; `parallelize(plan=...)`
    runs the plan as it is.
    """

    sharding: ShardingPlan

    @property
    def predicted(self) -> Prediction:
        """Seconds, bytes, memory and optimality gap of a step."""
        return self.sharding.predicted

    def explain(self, *, operators: bool = False) -> None:
        """Print the plan: specs of tensors, collectives by source line, cost and gap.

        Args:
          operators: print the strategy of every operator too, not only of heavy ones.
        """
        _explain.print_plan(self.sharding, operators=operators)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(_plan_file.to_json(self.sharding))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
          PlanFileError: the file is no plan, truncated, or of another version.
        """
        return cls(_plan_file.from_json(Path(path).read_text(), str(path)))

    def __str__(self) -> str:
        return _explain.format_plan(self.sharding)
