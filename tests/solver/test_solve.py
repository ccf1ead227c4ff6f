"""The whole solver against brute force, and what it promises of large problems."""

import re
from itertools import count, cycle, product
from math import inf
from pathlib import Path
from time import perf_counter

import highspy
import numpy as np
import pytest

import autopar.solver
from autopar.solver import ChoiceGraph, Infeasible, Node, solve
from autopar.solver.clock import Clock
from autopar.solver.ilp import solve_ilp
from tests.solver.brute_force import brute_force
from tests.solver.drawn import drawn
from tests.solver.long_graphs import train_step_graph
from tests.solver.random_graphs import random_graph


@drawn(24, 60)
def test_the_plan_is_that_of_brute_force(seeds: range) -> None:
    options = cycle(product((0.3, 1.0), (0.0, 1e-4, 0.05)))
    for seed, (density, gap) in zip(seeds, options, strict=False):
        graph = random_graph(seed, density=density, num_copies=2, forbidden=0.03)
        _check(graph, gap)


@drawn(40, 200)
def test_two_hundred_instances(seeds: range) -> None:
    """bound <= brute force <= plan."""
    for seed in seeds:
        graph = random_graph(seed, num_nodes=5, forbidden=0.03)
        try:
            best = brute_force(graph)
        except Infeasible:
            continue
        found = solve(graph, gap=1e-3)
        assert found.bound <= best.cost + 1e-9
        assert best.cost <= found.cost + 1e-9
        assert found.gap <= 1e-3


@drawn(15, 40)
def test_the_ilp_alone(seeds: range) -> None:
    for seed in seeds:
        graph = random_graph(seed, num_nodes=5, forbidden=0.03)
        found = solve_ilp(graph, gap=0.0)
        try:
            best = brute_force(graph)
        except Infeasible:
            assert found.choices is None and found.bound == inf
            continue
        assert found.choices is not None
        assert graph.cost(found.choices) == pytest.approx(best.cost)
        assert best.cost * (1 - 1e-6) <= found.bound <= best.cost


@drawn(8, 32)
def test_a_cutoff_is_reached_or_beaten(seeds: range) -> None:
    options = cycle(product((0.5, 0.9, 0.999, 1.01), (0, 1e-2)))
    for seed, (part, gap) in zip(seeds, options, strict=False):
        graph = random_graph(seed, density=1.0, num_copies=2, forbidden=0.03)
        try:
            best = brute_force(graph)
        except Infeasible:
            continue
        cutoff = part * best.cost
        found = solve(graph, gap=gap, cutoff=cutoff)
        assert found.bound <= best.cost * (1 + 1e-9) <= found.cost * (1 + 2e-9)
        assert found.bound >= cutoff or found.gap <= max(gap, 2e-8)
        ilp = solve_ilp(graph, gap=0.0, cutoff=cutoff)
        if part < 1:
            assert (ilp.bound, ilp.choices) == (cutoff, None)
        else:
            assert ilp.choices is not None
            assert graph.cost(ilp.choices) == pytest.approx(best.cost)
            assert best.cost * (1 - 1e-6) <= ilp.bound <= best.cost


def test_beyond_a_cutoff_no_integer_program_is_solved() -> None:
    sizes = {"num_nodes": 20, "most_choices": 6, "num_copies": 2}
    graph = random_graph(0, **sizes, density=1.0, forbidden=0.0)
    best = solve(graph, gap=1e-5)
    assert "likely" in {phase.name for phase in best.phases}
    found = solve(graph, gap=1e-5, cutoff=0.9 * best.cost)
    assert {phase.name for phase in found.phases} == {"reduce", "messages"}
    assert 0.9 * best.cost <= found.bound <= best.cost <= found.cost
    for part in (0.9999, 1.1):
        near = solve(graph, gap=1e-5, cutoff=part * best.cost)
        assert part * best.cost <= near.bound or near.cost == best.cost


def test_work_that_was_not_enough_is_told(caplog: pytest.LogCaptureFixture) -> None:
    graph = random_graph(0, num_nodes=20, most_choices=6, density=1.0, forbidden=0.0)
    found = solve(graph, gap=1e-9, work_limit=0.0)
    assert found.gap > 1e-9
    assert f"has a gap of {100 * found.gap:.2f}%" in caplog.text


def test_the_ilp_at_its_limit_on_nodes_says_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large programs end so, with a status that PuLP does not know."""
    limit = highspy.HighsModelStatus.kSolutionLimit
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda _: limit)
    graph = random_graph(0, forbidden=0.0)
    found, best = solve_ilp(graph, gap=0.0), brute_force(graph)
    assert found.choices is not None and found.bound <= best.cost
    assert graph.cost(found.choices) == best.cost


def test_the_ilp_ends_within_its_first_node_when_its_work_is_spent() -> None:
    sizes = {"num_nodes": 40, "most_choices": 12, "num_copies": 0}
    graph = random_graph(0, **sizes, density=0.5, forbidden=0.0)
    clock, limit = Clock(), 0.25
    found = solve_ilp(graph, gap=0.0, work_limit=limit, clock=clock)
    assert limit / 2 < clock.spent < 4 * limit
    best = solve(graph, gap=0.0, work_limit=0.1)
    assert found.bound <= best.cost
    assert found.choices is None or best.bound <= graph.cost(found.choices)


def test_the_ilp_of_nothing_costs_the_constant() -> None:
    found = solve_ilp(ChoiceGraph((), (), constant=2.0))
    assert (found.choices, found.bound) == ((), pytest.approx(2.0))


def test_forbidden_everywhere_is_infeasible() -> None:
    graph = ChoiceGraph((Node("n", np.array([inf]), np.zeros(1)),), ())
    with pytest.raises(Infeasible, match="must have a choice"):
        solve(graph)


def test_an_initial_plan_is_never_lost() -> None:
    graph = train_step_graph(1, (8, 2))
    best = solve(graph, gap=1e-3)
    again = solve(graph, gap=1e-3, work_limit=0.0, initial=best.choices)
    assert again.cost <= best.cost


def test_plans_do_not_depend_on_how_fast_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look at the time finds a minute gone; only the last resort is later."""
    graph = train_step_graph(1, (8, 2))
    rested = solve(graph, gap=1e-5, time_limit_seconds=inf)
    minutes = count(0.0, 60.0)
    for module in ("clock", "search"):
        path = f"autopar.solver.{module}.perf_counter"
        monkeypatch.setattr(path, lambda: next(minutes))
    hurried = solve(graph, gap=1e-5, time_limit_seconds=inf)
    assert (hurried.choices, hurried.bound) == (rested.choices, rested.bound)
    assert [p.name for p in hurried.phases] == [p.name for p in rested.phases]
    assert hurried.seconds > 60


def test_only_the_clock_looks_at_the_time() -> None:
    """Searches say how long their phases took; nothing else may know."""
    looking = re.compile(r"^(from time import|import time)", re.MULTILINE)
    paths = Path(autopar.solver.__path__[0]).glob("*.py")
    assert {p.stem for p in paths if looking.search(p.read_text())} == {
        "clock",
        "search",
    }


def test_at_the_last_resort_there_is_a_plan_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = train_step_graph(1, (8, 2))
    best = solve(graph, gap=1e-3)
    found = solve(graph, gap=1e-9, time_limit_seconds=0.0, initial=best.choices)
    assert found.cost <= best.cost and found.bound <= found.cost
    assert "depends on the machine" in caplog.text


def test_a_train_step_is_solved_to_the_gap() -> None:
    found = solve(train_step_graph(6, (8, 2)), work_limit=20)
    assert found.gap <= 1e-4
    assert "gap 0.00" in str(found)


@pytest.mark.slow
def test_thousands_of_nodes_in_seconds() -> None:
    graph = train_step_graph(84, (8, 4))
    assert len(graph.nodes) > 6_000
    start = perf_counter()
    found = solve(graph)
    assert found.gap <= 1e-3
    assert perf_counter() - start < 60


def _check(graph: ChoiceGraph, gap: float) -> None:
    try:
        best = brute_force(graph)
    except Infeasible:
        with pytest.raises(Infeasible):
            solve(graph, gap=gap)
        return
    found = solve(graph, gap=gap)
    assert graph.cost(found.choices) == found.cost
    assert found.bound <= best.cost + 1e-7
    assert best.cost - 1e-9 <= found.cost <= best.cost * (1 + gap) + 1e-6
    assert found.gap <= max(gap, 2e-8)
