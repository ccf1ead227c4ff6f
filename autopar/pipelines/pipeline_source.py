"""A planned pipeline whose step is at hand: planned again with other pins, and why.

The step is traced and cut again, at the same positions and onto the same submeshes. The
runner-up is found by planning its stage again without the choice, as it was planned at
first: its programs of a microbatch as one, then each for itself. Programs of other
stages stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.solver.choice_graph import Infeasible

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import OpGraph
from ..methods.methods import PipelineParallel, method_of_plan
from ..options import Options, pins_by_key
from ..planner.choice_holders import (
    OF_PORTS,
    factors_text,
    held_by_ports,
    held_by_restrictions,
    readers_of,
)
from ..planner.pin_choices import ChoicePins, Factors
from ..planner.pin_costs import PinCost, PinCosts
from ..planner.reasons import Alternative, Reasons
from ..planner.restrict import Limit
from ..plans.explain import format_bytes
from ..plans.staged_plan import StagedPlan
from ..sharding.pins import PinsLike, is_matched, keys_of_paths, spellings
from ..sharding.spec import format_spec
from ..state.placements import placement_pins
from .cut_step import cut_step
from .pipeline_choice import planned_pipeline
from .pipeline_plan import (
    PlannedPipeline,
    demands_of,
    planned_on,
    submesh_shapes,
)
from .program_plans import (
    Limits,
    PlannedProgram,
    ProgramPlanner,
    plan_programs,
)
from .stage_demands import StageDemands, StagePins

Seen = Callable[[StagedPlan], str]


@dataclass(frozen=True, eq=False)
class AskedPipeline:
    """A plan of a pipeline, and its step cut alike; `price` simulates a pipeline.

    `demands` are what is asked of all programs.
    """

    demands: StageDemands
    options: Options  # with the plan
    plan: StagedPlan
    base: PlannedPipeline
    price: Callable[[PlannedPipeline], StagedPlan]

    @staticmethod
    def of(
        call: tuple[Callable[..., Any], Sequence[Any], Any],
        plan: StagedPlan,
        options: Options,
        price: Callable[[PlannedPipeline], StagedPlan],
    ) -> AskedPipeline:
        """The step traced and cut as the plan says.

        Raises:
          NotImplementedError: the operators of `plan` were placed one by one.
          PlanFileError: the plan is of another step.
        """
        method, asked = method_of_plan(plan), options.method
        if isinstance(asked, PipelineParallel):
            method = replace(method, inside=asked.inside)
        options = replace(options, method=method, plan=plan, like=None)
        shapes = submesh_shapes(method, options, options.cluster or Cluster.local())
        made = cut_step(call[0], trace(*call), method, options)
        leaves = jax.tree.leaves(call[1:])
        demands = demands_of(made, leaves, method, shapes, options)
        base = planned_on(made, demands, method, shapes, options)
        return AskedPipeline(demands, options, plan, base, price)

    def tensor_reasons(self, program: int, tensor: int) -> Reasons:
        """Why a tensor of a program is made in its spec, or comes in it."""
        asked = self.base.programs[program]
        graph, kept = asked.graph, asked.plan.tensors[tensor]
        stage, own, names = asked.stage, kept.spec, asked.plan.mesh.axis_names

        def seen(staged: StagedPlan) -> str:
            found = staged.programs[program].sharding.tensors[tensor].spec
            return format_spec(found, len(kept.shape), names)

        words = f"another spec than {seen(self.plan)} for {kept.name}"

        def forbid(index: int | None) -> Sequence[Limit]:
            tests = {} if index is None else {index: lambda spec: spec != own}
            return (ChoicePins(words, tests, {}),) if tests else ()

        given = next((i.path for i in graph.inputs if i.tensor == tensor), None)
        results = dict(zip(graph.output_paths, graph.outputs, strict=True))
        made = next((path for path, made in results.items() if made == tensor), None)
        slot = given or made

        def limits(number: int | None, part: OpGraph) -> Sequence[Limit]:
            if given is not None and (found := _input(part, given)) is not None:
                return forbid(found)
            if slot is not None:
                return forbid(_output(part, slot))
            return forbid(tensor) if number == program else ()

        found = self._tried(stage, limits)
        alternatives = [_alternative("the runner-up", found, seen)]
        holders = list(self._holders(program, tensor, given))
        for text, pins in holders:
            if pins is not None:
                found = self._tried(stage, lambda number, part: (), pins)
                title = f"without {text.split(': ')[0]}"
                alternatives.append(_alternative(title, found, seen))
        return Reasons(
            tuple(text for text, _ in holders),
            tuple(alternatives),
            tuple(readers_of(graph, asked.plan, tensor)),
        )

    def operator_reasons(self, program: int, operator: int) -> Reasons:
        """Why an operator of a program, by its position, has its factors."""
        asked = self.base.programs[program]
        op = asked.graph.operators()[operator]
        if op.kind in STRUCTURED:
            return Reasons((OF_PORTS,), ())
        own = asked.plan.operators[operator].factors

        def seen(staged: StagedPlan) -> str:
            found = staged.programs[program].sharding.operators[operator].factors
            return factors_text(found, asked.plan.mesh)

        words = f"other factors than {seen(self.plan)} for {op.name}"

        def is_other(factors: Factors) -> bool:
            return factors != own

        def limits(number: int | None, part: OpGraph) -> Sequence[Limit]:
            if number != program:
                return ()
            return (ChoicePins(words, {}, {op.index: is_other}),)

        found = self._tried(asked.stage, limits)
        tensors = [each for each in op.operands if isinstance(each, int)]
        paths = {i.tensor: i.path for i in asked.graph.inputs}
        holders = dict.fromkeys(
            f"{text}, for {asked.plan.tensors[tensor].name}"
            for tensor in (*tensors, *op.results)
            for text, _ in self._holders(program, tensor, paths.get(tensor))
        )
        alternative = _alternative("the runner-up", found, seen)
        return Reasons(tuple(holders), (alternative,))

    def _of_stage(self, stage: int) -> dict[int, PlannedProgram]:
        programs = enumerate(self.base.programs)
        return {i: each for i, each in programs if each.stage == stage}

    def _tried(
        self, stage: int, limits: Limits, pins: StagePins | None = None
    ) -> StagedPlan | str:
        """The pipeline with a stage planned again, or why there is none.

        Where it does not fit the budget, the stage's state lies in more parts.
        """
        budget = self.options.memory_budget
        submesh = self.base.submesh(stage)
        peaks: list[int] = []
        try:
            for split in ((), (stage,)):
                found = self._planned(stage, limits, pins, split)
                peaks.append(found.peak_bytes[submesh])
                if budget is None or peaks[-1] <= budget:
                    return found
        except (InfeasiblePlanError, Infeasible):
            if not peaks:
                return "there is no other choice here"
        return f"none fits the memory: {format_bytes(min(peaks))} would do"

    def _planned(
        self,
        stage: int,
        limits: Limits,
        pins: StagePins | None,
        split: Collection[int],
    ) -> StagedPlan:
        base, demands = self.base, self.demands
        own = self._of_stage(stage)
        planned = plan_programs(
            base.made.programs,
            replace(demands, pins=pins or demands.pins, split=frozenset(split)),
            ProgramPlanner(),
            known={i: each for i, each in enumerate(base.programs) if i not in own},
            limits=limits,
        )
        bound = base.bound_seconds if pins is None else 0.0  # of fewer plans
        return self.price(replace(base, plans=planned, bound_seconds=bound))

    def _holders(
        self, program: int, tensor: int, given: str | None
    ) -> Iterator[tuple[str, StagePins | None]]:
        """What leaves a tensor no, or less, choice, and the pins without it."""
        asked, pins = self.base.programs[program], self.demands.pins
        graph, mesh, stage = asked.graph, asked.plan.mesh, asked.stage
        if given is not None:
            keys = {
                key: spec
                for key, spec in pins.pins.items()
                if key in spellings(given)
                or (key not in pins.of_paths and is_matched(key, [given]))
            }
            leaves = [pins.read_only.get(i.path) for i in graph.inputs]
            if keys:
                key = keys_of_paths(keys, [given])[given]
                rest = {k: spec for k, spec in pins.pins.items() if k != key}
                yield f"the pin {key!r}: {keys[key]}", replace(pins, pins=rest)
            elif tensor in placement_pins(leaves, graph, mesh):
                yield "the place where the argument lies when the step is called", None
            is_state = self.base.flow.slots[given].kind == "state"
            for other in () if is_state else self._of_stage(stage).values():
                if given in other.outputs and other is not asked:
                    yield f"stage {stage} {other.cut.kind}, which makes it so", None
        for words, _ in held_by_ports(graph, mesh, tensor):
            yield words, None
        for name in held_by_restrictions(
            self.demands.restrictions(graph, mesh), tensor
        ):
            yield name, None


@dataclass(frozen=True, eq=False)
class PipelineSource:
    """A step, the types of what it is called with, and what was asked of its plan.

    `price` simulates a planned pipeline.
    """

    fun: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options
    price: Callable[[PlannedPipeline], StagedPlan]
    asked: list[AskedPipeline] = field(init=False, default_factory=list[AskedPipeline])

    def what_if(
        self, plan: StagedPlan, pins: PinsLike, gap: float
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

    def tensor_reasons(self, plan: StagedPlan, tensor: int, program: int) -> Reasons:
        """Why a tensor of a program is made in its spec; errors as `AskedPipeline`."""
        return self._asked(plan).tensor_reasons(program, tensor)

    def operator_reasons(
        self, plan: StagedPlan, operator: int, program: int
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
        method = method_of_plan(plan)
        options = replace(self.options, method=method, pins=pins, plan=None)
        call = self.fun, self.args, self.kwargs
        return self.price(planned_pipeline(call, method, options, self.price))


def _input(part: OpGraph, slot: str) -> int | None:
    return next((i.tensor for i in part.inputs if i.path == slot), None)


def _output(part: OpGraph, slot: str) -> int | None:
    results = dict(zip(part.output_paths, part.outputs, strict=True))
    found = results.get(slot)
    return found if isinstance(found, int) else None


def _alternative(title: str, found: StagedPlan | str, seen: Seen) -> Alternative:
    if isinstance(found, str):
        return Alternative(title, "", None, found)
    return Alternative(title, seen(found), found)
