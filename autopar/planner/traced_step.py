"""A step that was planned, kept to be planned again: what a plan could be instead.

Nothing is traced again. The runner-up of a choice is exact, up to the gap at which the
solver stops: the problem is solved again with that choice forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.solver.choice_graph import Infeasible

from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..frontend.constant_leaves import ResultTree
from ..frontend.nnx import has_graph_nodes
from ..graph.build_graph import STRUCTURED
from ..graph.dependencies import tensors_of
from ..graph.traced_function import TracedFunction
from ..lowering.device_mesh import device_mesh
from ..lowering.spmd import input_shardings, output_shardings
from ..methods.batch_dims import flow_of_step
from ..methods.named_methods import restrictions_of
from ..options import Options, pins_by_key
from ..plans.plan import MemoryShares, Prediction, ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.pins import PinsLike, keys_of_arguments, resolve_pins
from ..sharding.spec import format_spec
from ..state.placements import placed_pins, placement_pins
from .budget import BudgetPlanner
from .choice_holders import (
    OF_PORTS,
    factors_text,
    held_by_ports,
    held_by_restrictions,
    readers_of,
)
from .graph_plan import blaming_pins, plan_graph
from .memory_users import memory_shares
from .mesh_search import TIGHT_GAP
from .pin_choices import ChoicePins
from .pin_costs import PinCosts, pin_costs, unpinned
from .plan_like import options_like
from .plan_request import PlanRequest
from .planned import Planned
from .reasons import Alternative, PlanShardings, Reasons
from .whole_step import batch_tensors

_PIN = "autopar_pin"


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedStep(PlanRequest):
    """The graph of a step, what it is called with, and what was asked of its plan.

    `leaves` are types with shardings: a plan keeps no arrays alive.
    """

    traced: TracedFunction

    def shardings(self, plan: ShardingPlan, mesh: Mesh | None) -> PlanShardings:
        """Where a plan has arguments and results, on a mesh of such axes.

        Raises:
          ValueError: some argument goes by keyword or is a module of NNX, or the mesh
            has other axes.
        """
        if mesh is not None and tuple(mesh.shape.items()) != tuple(
            zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)
        ):
            raise ValueError(
                f"Shardings of a plan are on a mesh of its axes, {plan.mesh}, but got "
                f"{dict(mesh.shape)}; plan with parallelize(step, mesh=mesh)."
            )
        here = mesh or device_mesh(plan.mesh, self.options.mesh, self.cluster)
        tree = self.traced.in_tree
        homes = input_shardings(plan, here)[: tree.num_leaves]
        args, kwargs = ResultTree.of(tree).unflatten(homes)
        if has_graph_nodes(args):
            raise ValueError(
                "jax.jit takes trees of arrays, but an argument is a module of NNX; "
                "plan the step as a function of what nnx.split returns."
            )
        if kwargs:
            raise ValueError(
                f"jax.jit takes shardings of arguments by position, but "
                f"{', '.join(kwargs)} went by keyword; plan with all by position."
            )
        ends = output_shardings(self.graph, plan, here)
        results = ResultTree.of(self.traced.out_tree).unflatten(ends)
        return PlanShardings(args, results)

    def memory(self, plan: ShardingPlan) -> MemoryShares:
        """What a device holds at the peak, by kind and by line."""
        profile = memory_profile(self.graph, plan)
        flow = flow_of_step(self.graph, self.batch)
        return memory_shares(profile, flow, plan.predicted.peak_bytes)

    def what_if(
        self, plan: ShardingPlan, pins: PinsLike, gap: float
    ) -> tuple[ShardingPlan, TracedStep]:
        """The step planned with more pins, on the mesh of `plan`, within `gap`.

        Raises:
          InfeasiblePlanError: no plan has these pins.
          ValueError: a pin matches nothing, or cannot be.
        """
        paths = [each.path for each in self.graph.inputs]
        more = placed_pins(pins_by_key(pins), paths, self.leaves, plan.mesh)
        both = {**more, **{k: v for k, v in self.options.pins.items() if k not in more}}
        asked = self.asking(pins=both, plan=None)
        if self.options.plan is None and self._is_kept(plan, more, gap):
            return plan, asked
        request = self.asking(
            pins=both,
            mesh=self.options.mesh or _abstract_mesh(plan.mesh),
            plan=None,
            memory_budget=self._budget(plan),
        )
        try:
            made = plan_graph(request, gap)
        except InfeasiblePlanError as error:
            raise blaming_pins(error, request, gap) from None
        found = replace(made, remat=plan.remat, padding=plan.padding)
        return _corrected(found, plan.predicted), asked

    def _is_kept(
        self, plan: ShardingPlan, pins: Mapping[str, PartitionSpec], gap: float
    ) -> bool:
        """Whether the best plan has these pins, and so is the best with them."""
        pinned = resolve_pins(pins, self.graph, plan.mesh)
        return plan.predicted.optimality_gap <= gap and all(
            pin.allows(plan.tensors[tensor].spec) for tensor, pin in pinned.items()
        )

    def pin_costs(self, plan: ShardingPlan) -> PinCosts:
        """What each pin adds to a step; errors are those of `pin_costs`."""
        mesh = self.options.mesh or _abstract_mesh(plan.mesh)
        request = self.asking(mesh=mesh, memory_budget=self._budget(plan))
        return pin_costs(plan, request)

    def tensor_reasons(self, plan: ShardingPlan, tensor: int, program: int) -> Reasons:
        """Why a tensor, by index, is made in its spec."""
        rank, names = len(plan.tensors[tensor].shape), plan.mesh.axis_names
        own, name = plan.tensors[tensor].spec, plan.tensors[tensor].name

        def seen(other: ShardingPlan) -> str:
            found = next(each for each in other.tensors if each.name == name)
            return format_spec(found.spec, rank, names)

        another = ChoicePins(
            f"another spec than {seen(plan)} for {name}",
            {tensor: lambda spec: spec != own},
            {},
        )
        alternatives = [self._alternative("the runner-up", plan, seen, self, another)]
        holders = list(self._holders(plan, tensor))
        for words, unpinned_step in holders:
            if unpinned_step is not None:
                title = f"without {words.split(': ')[0]}"
                found = self._alternative(title, plan, seen, unpinned_step)
                alternatives.append(found)
        return Reasons(
            tuple(words for words, _ in holders),
            tuple(alternatives),
            tuple(readers_of(self.graph, plan, tensor)),
        )

    def operator_reasons(
        self, plan: ShardingPlan, operator: int, program: int
    ) -> Reasons:
        """Why an operator, by position, has its factors."""
        op, own = self.graph.operators()[operator], plan.operators[operator].factors
        if op.kind in STRUCTURED:
            return Reasons((OF_PORTS,), ())

        def seen(other: ShardingPlan) -> str:
            return factors_text(other.operators[operator].factors, plan.mesh)

        another = ChoicePins(
            f"other factors than {seen(plan)} for {op.name}",
            {},
            {op.index: lambda factors: factors != own},
        )
        found = self._alternative("the runner-up", plan, seen, self, another)
        holders = dict.fromkeys(
            f"{words}, for {plan.tensors[tensor].name}"
            for tensor in (*tensors_of(op.operands), *op.results)
            for words, _ in self._holders(plan, tensor)
        )
        return Reasons(tuple(holders), (found,))

    def _alternative(
        self,
        title: str,
        plan: ShardingPlan,
        seen: Callable[[ShardingPlan], str],
        step: TracedStep,
        *limits: ChoicePins,
    ) -> Alternative:
        """`step` planned on the mesh of `plan`; `seen` reads the choice then."""
        graph, mesh, options = step.graph, plan.mesh, step.options
        rules = options.method, options.rules, graph, mesh, step.batch
        pins = placement_pins(step.leaves, graph, mesh)
        pins |= resolve_pins(options.pins, graph, mesh)
        try:
            planner = BudgetPlanner(
                *(graph, mesh, step.cluster, step.batch),
                pins=pins,
                limits=(*restrictions_of(*rules), *limits),
            )
            found = planner.within(step._budget(plan), TIGHT_GAP).plan
        except (InfeasiblePlanError, Infeasible) as error:
            return Alternative(title, "", None, _refusal(error))
        found = _corrected(found, plan.predicted)
        return Alternative(title, seen(found), found)

    def _holders(
        self, plan: ShardingPlan, tensor: int
    ) -> Iterator[tuple[str, TracedStep | None]]:
        """What leaves a tensor no, or less, choice; the step without it, if a pin."""
        graph, mesh, options = self.graph, plan.mesh, self.options
        key = keys_of_arguments(options.pins, graph, "pin").get(tensor)
        if key is not None:
            rest = {k: spec for k, spec in options.pins.items() if k != key}
            yield f"the pin {key!r}: {options.pins[key]}", self.asking(pins=rest)
        elif tensor in placement_pins(self.leaves, graph, mesh):
            yield "the place where the argument lies when the step is called", None
        for words, op in held_by_ports(graph, mesh, tensor):
            free = None
            if op is not None and op.kind == _PIN:
                free = replace(self, graph=unpinned(graph, op.source))
            yield words, free
        rules = options.method, options.rules, graph, mesh, self.batch
        for name in held_by_restrictions(restrictions_of(*rules), tensor):
            yield name, None

    def _budget(self, plan: ShardingPlan) -> int:
        """What a device may hold by the model, whose error on the step was seen."""
        predicted = plan.predicted
        allowed = predicted.budget_bytes or self.options.budget_on(self.cluster)
        return int(allowed / predicted.memory_correction)


def traced_step(
    planned: Planned, leaves: Sequence[Any], options: Options
) -> TracedStep:
    """The step of a plan, to be planned again.

    Args:
      planned: the step and its plan.
      leaves: the leaves of its arguments; only their places are kept.
      options: what it was planned with.
    """
    types = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding)
        else kind
        for leaf, kind in zip(leaves, planned.argument_types, strict=False)
    ]
    batch = batch_tensors(planned.traced, planned.graph, options)
    graph, cluster = planned.graph, planned.cluster
    given = graph, tuple(types), tuple(batch), cluster, options
    step = TracedStep(*given, traced=planned.traced).with_placed_pins()
    if options.like is not None:
        step = replace(step, options=options_like(step.options, graph, cluster))
    return step


def _abstract_mesh(mesh: MeshShape) -> AbstractMesh:
    """Which may have fewer devices than the cluster."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names)


def _corrected(plan: ShardingPlan, seen: Prediction) -> ShardingPlan:
    """With the budget, and the error of the memory model, of another plan of a step."""
    predicted = replace(
        plan.predicted,
        peak_bytes=round(plan.predicted.peak_bytes * seen.memory_correction),
        budget_bytes=seen.budget_bytes,
        memory_correction=seen.memory_correction,
    )
    return replace(plan, predicted=predicted)


def _refusal(error: Exception) -> str:
    if isinstance(error, InfeasiblePlanError) and error.least_budget_bytes:
        return f"none fits the memory: {error.least_budget_bytes:,} B would do"
    return "there is no other choice here"
