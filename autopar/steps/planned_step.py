"""What a function knows of calls of one kind: their plan, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..frontend.constant_leaves import ResultTree
from ..pipelines.pipeline import PipelinedStep
from ..pipelines.pipeline_plan import PlannedPipeline
from ..planner.planned import Planned
from .execution import Executable, executable_of, pipelined_step
from .parallel_plan import Plan


@dataclass(eq=False)
class PlannedStep:
    """What is known of calls of one kind; what runs them is made when it is asked for.

    `key` is that of the calls, and `plan` what the user got of `planned`.
    """

    key: Any
    planned: Planned | PlannedPipeline
    plan: Plan | None = None

    @cached_property
    def run(self) -> tuple[Executable, ResultTree]:
        """What runs the calls, and the tree of their results."""
        if isinstance(self.planned, PlannedPipeline):
            traced = self.pipelined.pipeline.traced
            return self.pipelined, ResultTree.of(traced.out_tree)
        tree = ResultTree.of(self.planned.traced.out_tree)
        return executable_of(self.planned), tree

    @property
    def has_run(self) -> bool:
        """Whether it is known what runs the calls."""
        return "run" in self.__dict__

    @cached_property
    def pipelined(self) -> PipelinedStep:
        assert isinstance(self.planned, PlannedPipeline)
        return pipelined_step(self.planned)
