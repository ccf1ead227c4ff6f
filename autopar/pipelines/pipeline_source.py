"""A pipelined step that was planned, kept to be planned again with other pins.

The step is traced and cut again, at the same positions and onto the same submeshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from ..options import Options, pins_by_key
from ..plans.parallel_plan import Plan
from ..plans.pin_cost import PinCost, PinCosts
from ..plans.reasons import Reasons
from ..plans.staged_plan import StagedPlan
from ..sharding.pins import PinsLike
from .pipeline_choice import planned_pipeline
from .pipeline_plan import PlannedPipeline
from .stage_reasons import AskedPipeline


@dataclass(frozen=True, eq=False)
class PipelineSource:
    """A step, the types of what it is called with, and what was asked of its plan.

    `price` simulates a planned pipeline.
    """

    fun: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options
    price: Callable[[PlannedPipeline], Plan]
    asked: list[AskedPipeline] = field(init=False, default_factory=list[AskedPipeline])

    def what_if(
        self, plan: StagedPlan, pins: PinsLike
    ) -> tuple[StagedPlan, PipelineSource]:
        """The step planned with more pins, in the stages of `plan`.

        Raises:
          InfeasiblePlanError: a stage does not fit then.
          NotImplementedError: the operators of `plan` were placed one by one.
          ValueError: a pin matches nothing, or cannot be.
        """
        more = pins_by_key(pins)
        both = {**more, **{k: v for k, v in self.options.pins.items() if k not in more}}
        asked = replace(self, options=replace(self.options, pins=both, plan=None))
        return asked._planned(plan, both), asked

    def pin_costs(self, plan: StagedPlan) -> PinCosts:
        """What each of `pins` adds to a step; those inside of the step stay."""
        pins = self.options.pins
        step_seconds = plan.predicted.step_seconds
        costs: list[PinCost] = []
        for key in pins:
            rest = {k: spec for k, spec in pins.items() if k != key}
            found = self._planned(plan, rest).predicted.step_seconds
            costs.append(PinCost(key, step_seconds, found))
        costs.sort(key=lambda cost: -cost.seconds)
        return PinCosts(step_seconds, tuple(costs))

    def tensor_reasons(self, plan: StagedPlan, program: int, tensor: int) -> Reasons:
        """Why a tensor of a program is made in its spec; errors as `AskedPipeline`."""
        return self._asked(plan).tensor_reasons(program, tensor)

    def operator_reasons(
        self, plan: StagedPlan, program: int, operator: int
    ) -> Reasons:
        """Why an operator of a program has its factors; errors as `AskedPipeline`."""
        return self._asked(plan).operator_reasons(program, operator)

    def _asked(self, plan: StagedPlan) -> AskedPipeline:
        """The plan beside its step, which is traced when it is first asked."""
        if not self.asked or self.asked[0].plan is not plan:
            call = self.fun, self.args, self.kwargs
            self.asked[:] = [AskedPipeline.of(call, plan, self.options, self.price)]
        return self.asked[0]

    def _planned(
        self, plan: StagedPlan, pins: Mapping[str, PartitionSpec]
    ) -> StagedPlan:
        method = plan.method
        options = replace(self.options, method=method, pins=pins, plan=None)
        call = self.fun, self.args, self.kwargs
        return self.price(planned_pipeline(call, method, options, self.price)).stages
