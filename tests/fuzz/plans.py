"""Random legal plans: any strategy of any operator, not only what a solver takes."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import autopar.rules
from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import SIZES
from autopar.costs.resharding import Resharder
from autopar.frontend.tracing import trace, weak_outputs
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.graph.traced_function import Roles, TracedFunction
from autopar.lowering.programs import build_program
from autopar.planner.intra_op import read_plan
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.planner.whole_step import roles_of
from autopar.plans.plan import ShardingPlan
from autopar.rules.base import rule_name
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import Spec
from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import ChoiceGraph
from autopar.solver.solve import solve
from autopar.steps.lowered_step import Lowered
from autopar.steps.parallel_plan import Plan

assert autopar.rules  # imported so that every rule registers
# How choices are made: each at random, by the solver with random costs, by the solver.
Manner = Literal["uniform", "costs", "solver"]
CLUSTER = Cluster.local()


@dataclass(frozen=True)
class Case:
    """Where and how a program is run: the mesh, and the seed and manner of its plan."""

    mesh: MeshShape
    manner: Manner
    seed: int

    def __str__(self) -> str:
        return f"mesh {self.mesh}, {self.manner} plan of seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Traced:
    """A function with its graph, as `parallelize` makes them at one signature."""

    function: TracedFunction
    graph: OpGraph
    roles: Roles

    @property
    def donated(self) -> tuple[int, ...]:
        """State, which `parallelize` donates."""
        roles = enumerate(self.roles.roles)
        return tuple(index for index, role in roles if role == "state")


def trace_program(function: Any, args: Sequence[Any]) -> Traced:
    traced = trace(function, args, {})
    roles = roles_of(traced)
    return Traced(traced, build_graph(traced, roles), roles)


class _Unpriced(Resharder):
    """For choices made without regard to costs, most of which are for resharding."""

    def by_size(self, sources: Sequence[Spec], targets: Sequence[Spec]) -> np.ndarray:
        return np.zeros((len(SIZES), len(sources), len(targets)))


@functools.cache
def resharder_of(mesh: MeshShape) -> Resharder:
    """Its paths are found once for all programs."""
    return Resharder(mesh, CLUSTER)


def lower_case(traced: Traced, case: Case) -> Lowered:
    """The program that a random plan stands for, on the first devices."""
    resharder = resharder_of(case.mesh)
    priced = resharder if case.manner != "uniform" else _Unpriced(case.mesh, CLUSTER)
    problem = build_problem(traced.graph, case.mesh, CLUSTER, priced)
    plan = random_plan(problem, resharder, case)
    count, sizes = case.mesh.size, case.mesh.axis_sizes
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    types = (AxisType.Auto,) * case.mesh.num_axes
    program = build_program(
        traced.graph,
        plan,
        resharder,
        Mesh(devices, case.mesh.axis_names, axis_types=types),
        [
            jax.ShapeDtypeStruct(
                var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type
            )
            for var in traced.function.jaxpr.jaxpr.invars
        ],
        traced.function.jaxpr.consts,
        traced.donated,
        weak_outputs(traced.function),
    )
    return Lowered(program, Plan(plan), traced.function, traced.graph)


def random_plan(
    problem: ShardingProblem, resharder: Resharder, case: Case
) -> ShardingPlan:
    """A legal plan of the problem, the same for one seed and manner."""
    graph = problem.choice_graph
    if case.manner == "solver":
        assignment = solve(graph)
    elif case.manner == "costs":
        assignment = solve(with_random_costs(graph, case.seed), gap=0.5)
    else:
        assignment = uniform_choices(graph, case.seed)
    return read_plan(problem, assignment, CLUSTER, resharder)


def case_reaching(
    traced: Traced, case: Case, reached: Collection[tuple[str, str]], tries: int = 48
) -> Case:
    """The same mesh, with the seed that makes the most use of strategies not reached.

    Args:
      traced: the program.
      case: what is returned if no seed reaches more.
      reached: strategies as (rule, factor).
      tries: how many seeds of uniform plans are tried.
    """
    problem = build_problem(
        traced.graph, case.mesh, CLUSTER, _Unpriced(case.mesh, CLUSTER)
    )
    operators = list(traced.graph.operators())
    axes = [axis for axis, size in enumerate(case.mesh.axis_sizes) if size > 1]
    wanted = []  # for each operator that could: its node, and what each choice gives
    for index, vertex in enumerate(problem.vertices):
        if vertex.operator is None or vertex.strategies is None:
            continue
        rule, strategies = rule_name(operators[vertex.operator]), vertex.strategies
        names = [(rule, factor.name) for factor in strategies.factors]
        new = {i for i, name in enumerate(names) if name not in reached}
        if new:
            rows = strategies.factor_index[:, axes]
            wanted.append(
                (index, [[names[i] for i in row if i in new] for row in rows])
            )

    def gain(seed: int) -> int:
        choices = uniform_choices(problem.choice_graph, seed).choices
        return len({name for index, rows in wanted for name in rows[choices[index]]})

    best = max(range(case.seed, case.seed + tries), key=gain) if wanted else case.seed
    if not wanted or not gain(best):
        return case
    return replace(case, manner="uniform", seed=best)


def uniform_choices(graph: ChoiceGraph, seed: int) -> Assignment:
    """Every choice at random, those forbidden as a waste of time included.

    What the rules allow is legal in any combination: every spec reaches every other.
    """
    draw = random.Random(seed)
    choices = tuple(draw.randrange(node.costs.size) for node in graph.nodes)
    return Assignment(choices, 0.0, 0.0)


def with_random_costs(graph: ChoiceGraph, seed: int) -> ChoiceGraph:
    """The same choices at random costs, so that long chains agree on a spec."""
    draw = np.random.default_rng(seed)
    scale = float(draw.choice([0.3, 1.0, 3.0]))

    def mixed(costs: np.ndarray, weight: float) -> np.ndarray:
        changes = np.isfinite(costs) & (costs > 0)
        return np.where(changes, weight * draw.exponential(size=costs.shape), costs)

    nodes = [
        replace(node, costs=draw.exponential(size=node.costs.shape))
        for node in graph.nodes
    ]
    edges = [replace(edge, costs=mixed(edge.costs, scale)) for edge in graph.edges]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))
