"""Copies of parameters that are kept behind a barrier, whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.costs.memory import MemoryProfile
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.ports import barriers_of
from autopar.methods.gather_again import gathering_again
from autopar.methods.named_methods import Zero, restriction_of
from autopar.methods.restrictions import restrict
from autopar.planner.barrier_ports import BarrierPorts
from autopar.planner.intra_op import read_profile
from autopar.planner.plan_points import PlanPoints
from autopar.planner.planning import roles_of
from autopar.planner.point_rows import rows_of_point
from autopar.planner.program_points import memory_rows
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.planner.step_variants import StepVariants
from autopar.rematerialisation.remat import Remat
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.solver.assignment import Assignment
from autopar.solver.solve import solve
from benchmarks.models import build

MESH, CLUSTER = parse_mesh("x:2;y:4", 8), Cluster.local()
RESHARDER = Resharder(MESH, CLUSTER)


@cache
def zero() -> tuple[ShardingProblem, Assignment]:
    """A problem in which parameters may be gathered again, and ZeRO-3's plan."""
    workload = build("gpt", num_layers=4)
    traced = trace(workload.step, workload.abstract(), {})
    graph = gathering_again(build_graph(traced, roles_of(traced)))
    problem = build_problem(graph, MESH, CLUSTER, RESHARDER, counts_memory=True)
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    limit = restriction_of(Zero(3), graph, MESH, batch)
    return problem, solve(restrict(problem, (limit,), CLUSTER).choice_graph)


def profile_of(found: Assignment) -> MemoryProfile:
    return read_profile(zero()[0], found, CLUSTER, RESHARDER)


def passed() -> list[tuple[int, int, int]]:
    """(tensor, its relay, the port by which it passes a barrier) of parameters."""
    problem = zero()[0]
    state = {e.tensor for e in problem.graph.inputs if e.role == "state"}
    return [
        (tensor, problem.relays[tensor], problem.writers[behind][0])
        for _, (tensor, behind) in barriers_of(problem.graph.blocks[0])
        if tensor in state and tensor in problem.relays
    ]


def test_rows_tell_what_a_barrier_passes_of_a_parameter() -> None:
    """Of one that is split over all devices: nothing, or the copy that was made whole
    before, of which a part that passes is a slice."""
    problem, found = zero()
    profile = profile_of(found)
    held = problem.choice_graph.bytes_by_node
    points = PlanPoints(problem, profile, found.choices)
    places = range(len(profile.liveness[0].order))
    fullest = max(places, key=lambda at: len(points.at(0, at).kept))
    kept = points.at(0, fullest).kept
    rows = rows_of_point(problem, points.at(0, fullest), found.choices)
    home, port, amount, copied = max(kept, key=lambda each: each[2])
    own = float(held[home][found.choices[home]])
    assert own == amount / 8 == held[port][found.choices[port]]
    told = set[float]()
    for choice, passed_bytes in enumerate(held[port].tolist()):
        other = list(found.choices)
        other[port] = choice
        more = {row.used(other) - row.used(found.choices) for row in rows}
        expected = 0 if passed_bytes <= own else amount
        assert max(more) == pytest.approx(expected, abs=1.0)
        told.add(passed_bytes)
    assert copied == amount
    assert {own, amount / 4, amount / 2, amount} <= told


def test_a_barrier_reads_no_slice_of_a_copy_where_the_parameter_will_do() -> None:
    """A copy that was made for the forward pass would be kept for the slice."""
    problem, found = zero()
    graph, held = problem.choice_graph, problem.choice_graph.bytes_by_node
    sliced, changed = list(found.choices), set[int]()
    for _, relay, port in passed():
        own = problem.vertices[port].writes[0].choices
        lies, copied = found.choices[port], found.choices[relay]
        if held[relay][copied] <= held[port][lies]:
            continue
        for choice in np.flatnonzero(held[port] == held[port][lies]).tolist():
            sliced[port] = choice
            is_free = graph.cost(sliced) <= found.cost * (1 + 1e-12)
            if is_free and own.of(choice) != own.of(lies):
                changed.add(port)
                break
            sliced[port] = lies
    assert len(changed) >= 3
    mended = BarrierPorts(problem).passing_as_it_lies(sliced)
    assert mended == found.choices

    def peak(choices: Sequence[int]) -> int:
        plan = replace(found, choices=tuple(choices))
        return read_profile(problem, plan, CLUSTER, RESHARDER).peak_bytes

    assert peak(mended) < peak(sliced)


def test_rows_do_not_charge_what_passes_barriers_as_it_lies() -> None:
    """Split over fewer devices than in the plan of the rows, but not gathered again.

    No barrier passes less of it than lies in memory: that would save nothing.
    """
    problem, found = zero()
    graph, held = problem.choice_graph, problem.choice_graph.bytes_by_node
    less_split, narrower = list(found.choices), list(found.choices)
    for tensor, relay, port in passed():
        home, made = problem.writers[tensor]
        whole = problem.graph.tensors[tensor].type.bytes
        choice = int(np.flatnonzero(held[home] == whole / 2)[0])
        spec = made.choices.of(choice)
        less_split[home] = narrower[home] = choice
        own = problem.vertices[port].writes[0].choices
        less_split[port] = int(own.are(spec).argmax())
        assert held[relay][found.choices[relay]] == whole > held[port][narrower[port]]
    assert graph.cost(narrower) == np.inf
    assert graph.cost(less_split) < np.inf
    points = PlanPoints(problem, profile := profile_of(found), found.choices)
    places = range(len(profile.liveness[0].order))
    fullest = points.at(0, max(places, key=lambda at: len(points.at(0, at).kept)))
    for home, port, _, _ in fullest.kept:
        other = list(found.choices)
        other[home], other[port] = less_split[home], less_split[port]
        more = float(held[home][other[home]] - held[home][found.choices[home]])
        for row in rows_of_point(problem, fullest, found.choices):
            grown = row.used(other) - row.used(found.choices)
            assert grown <= 2 * more + 1.0  # it, and what will replace it


def test_what_passes_two_barriers_is_not_kept_for_the_later_one_alone() -> None:
    """It takes more time than to keep it for both, and no less memory.

    Rows, which charge what is kept to the barrier that is read next, tell of the rest.
    """
    workload = build("gpt", num_layers=2)
    traced = trace(workload.step, workload.abstract(), {})
    roles = roles_of(traced)
    own = build_graph(traced, roles)
    batch = [each.tensor for each in own.inputs if each.role == "batch"]
    variants = StepVariants(traced, own, roles, batch)
    graph = gathering_again(variants.make(Remat("full"), ()).graph)
    problem = build_problem(graph, MESH, CLUSTER, RESHARDER, counts_memory=True)
    limit = restriction_of(Zero(3), graph, MESH, batch)
    found = solve(restrict(problem, (limit,), CLUSTER).choice_graph)
    profile = read_profile(problem, found, CLUSTER, RESHARDER)
    rows = memory_rows(problem, profile, found.choices)
    ports: dict[int, list[int]] = {}
    for _, (tensor, behind) in barriers_of(graph.blocks[0]):
        ports.setdefault(tensor, []).append(problem.writers[behind][0])
    twice = [each for each in ports.values() if len(each) == 2]
    assert len(twice) >= 6
    kept: dict[str, list[int]] = {}
    for name, chosen in (("sooner", [0]), ("later", [1]), ("both", [0, 1])):
        kept[name] = list(found.choices)
        for port in (pair[number] for pair in twice for number in chosen):
            choices = problem.vertices[port].writes[0].choices
            kept[name][port] = int(choices.fractions.argmax())
    cost = {name: problem.choice_graph.cost(each) for name, each in kept.items()}
    assert cost["both"] < cost["sooner"] < cost["later"] == np.inf
    for name in ("sooner", "both"):
        plan = replace(found, choices=tuple(kept[name]), cost=cost[name])
        live = read_profile(problem, plan, CLUSTER, RESHARDER).live_bytes
        assert live > profile.live_bytes
        assert max(row.used(kept[name]) for row in rows) >= 0.95 * live
