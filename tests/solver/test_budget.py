"""Solving within a budget: bound <= brute force <= plan, and always the same plan."""

from dataclasses import replace
from math import inf
from typing import Any

import highspy
import numpy as np
import pytest

from autopar.solver import ChoiceGraph, Infeasible, budget, solve
from autopar.solver.array_pool import ArrayPool
from autopar.solver.brute_force import brute_force
from autopar.solver.budget import WithinRows
from autopar.solver.choice_graph import Edge, Node
from autopar.solver.kept_choices import KeptChoices
from autopar.solver.likely import beyond_least
from autopar.solver.memory_rows import MemoryRow, live_row
from autopar.solver.multipliers import best_prices, price
from autopar.solver.relaxation import Relaxation, num_pairs
from autopar.solver.search import Search
from autopar.solver.within_rows import solve_within_rows
from tests.solver.random_graphs import (
    every_assignment,
    random_graph,
    random_rows,
    with_budget,
)

NUM_INSTANCES = 200


def instance(seed: int) -> ChoiceGraph:
    """Every other one with a budget between the least and what a free plan takes."""
    graph = random_graph(seed, num_nodes=6, forbidden=0.03, num_live_sets=3)
    if seed % 2:
        return with_budget(graph, 0.6)
    return with_budget(graph, 0.15 + 0.01 * (seed % 20))


def test_bound_brute_force_plan_and_the_same_again() -> None:
    num_binding = num_infeasible = 0
    for seed in range(NUM_INSTANCES):
        graph = instance(seed)
        try:
            best = brute_force(graph)
        except Infeasible as error:
            num_infeasible += 1
            with pytest.raises(Infeasible) as raised:
                solve(graph, gap=1e-3)
            low, high = raised.value.least_budget_bound, raised.value.least_budget
            assert low <= error.least_budget * (1 + 1e-6), seed
            assert error.least_budget <= high * (1 + 1e-6), seed
            assert high <= error.least_budget * 1.01 + 1e-6, seed
            continue
        free = brute_force(replace(graph, budget=None))
        num_binding += not graph.is_within_budget(free.choices)
        found = solve(graph, gap=1e-3)
        assert graph.is_within_budget(found.choices), seed
        assert found.bound <= best.cost + 1e-7, seed
        assert best.cost - 1e-9 <= found.cost <= best.cost * (1 + 1e-3) + 1e-7, seed
        again = solve(graph, gap=1e-3)
        assert (again.choices, again.bound) == (found.choices, found.bound), seed
    assert num_binding + num_infeasible >= NUM_INSTANCES // 3
    assert num_binding >= NUM_INSTANCES // 5


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_any_weights(seed: int) -> None:
    graph = random_graph(seed, num_nodes=5, forbidden=0.0, num_copies=0)
    rows = random_rows(graph, seed)
    peaks = {x: max(r.used(x) for r in rows) for x in every_assignment(graph)}
    budget = float(np.quantile(list(peaks.values()), 0.2))
    costs = {x: graph.cost(x) for x, peak in peaks.items() if peak <= budget}
    best = min(costs.values(), default=inf)
    free = solve(graph)
    if best == inf:
        with pytest.raises(Infeasible):
            solve_within_rows(graph, rows, budget, gap=1e-3, free=free)
        return
    found = solve_within_rows(graph, rows, budget, gap=1e-3, free=free)
    assert peaks[found.choices] <= budget
    assert found.bound <= best + 1e-7
    assert best - 1e-9 <= found.cost <= best * (1 + 1e-3) + 1e-7


@pytest.mark.parametrize("seed", range(20))
def test_the_relaxation_and_its_prices_are_below_every_plan_that_fits(
    seed: int,
) -> None:
    graph = random_graph(seed, num_nodes=5, forbidden=0.03, num_live_sets=3)
    graph = with_budget(graph, 0.4)
    assert graph.budget is not None
    try:
        best = brute_force(graph)
    except Infeasible:
        return
    everything = np.ones(graph.num_choices, bool)
    relaxation = Relaxation(graph, everything, graph.budget, size=best.cost)
    rows = [live_row(graph, live) for live in range(3)]
    without = relaxation.solve(everything)
    for row in rows:
        relaxation.add_row(row)
    relaxed = relaxation.solve(everything)
    assert without is not None and relaxed is not None
    assert without.value - 1e-6 <= relaxed.value <= best.cost + 1e-6
    priced = price(graph, rows, relaxed.prices, graph.budget)
    assert relaxed.value - 1e-5 <= brute_force(priced).cost <= best.cost + 1e-6
    starts = np.cumsum([0, *(node.costs.size for node in graph.nodes)])
    for x in every_assignment(graph):
        if graph.is_within_budget(x) and graph.cost(x) < inf:
            beyond = relaxed.excess[starts[:-1] + np.array(x)].max()
            assert graph.cost(x) >= relaxed.value + beyond - 1e-6


def test_a_relaxation_knows_only_its_domain() -> None:
    graph = random_graph(3, num_nodes=6, density=1.0, num_copies=0, forbidden=0.0)
    everything = np.ones(graph.num_choices, bool)
    only = np.zeros(graph.num_choices, bool)
    starts = np.cumsum([0, *(node.costs.size for node in graph.nodes)])
    choices = tuple(node.costs.size - 1 for node in graph.nodes)
    only[starts[:-1] + np.array(choices)] = True
    relaxed = Relaxation(graph, only, 1.0, size=1.0).solve(only)
    assert relaxed is not None
    assert relaxed.value == pytest.approx(graph.cost(choices), abs=1e-6)
    assert num_pairs(graph, only) == len(graph.edges) < num_pairs(graph, everything)


@pytest.mark.parametrize("seed", range(10))
def test_kept_choices_hold_the_best_plan_of_every_budget(seed: int) -> None:
    """Reduced once: for any budget the optimum of what is kept is that of all."""
    graph = random_graph(seed, num_nodes=6, forbidden=0.0, num_live_sets=2)
    full_rows = [live_row(graph, live) for live in range(2)]
    kept = KeptChoices(graph, full_rows, ArrayPool())
    rows = [kept.row(row) for row in full_rows]
    plans = {
        x: (kept.graph.cost(x), max(row.used(x) for row in rows))
        for x in every_assignment(kept.graph)
    }
    for fraction in (0.2, 0.4, 0.6):
        tight = with_budget(graph, fraction)
        limit = (tight.budget or 0.0) + 1e-6
        least = min((c for c, peak in plans.values() if peak <= limit), default=inf)
        try:
            assert least == pytest.approx(brute_force(tight).cost)
        except Infeasible:
            assert least == inf
    for x, (cost, peak) in plans.items():
        if cost < inf:
            assert graph.cost(kept.expand(x)) == pytest.approx(cost)
            assert graph.peak_bytes(kept.expand(x)) == pytest.approx(peak)
            made = kept.made_by(kept.expand(x))
            starts = np.cumsum([0, *(node.costs.size for node in kept.graph.nodes)])
            assert made[starts[:-1] + np.array(x)].all()


def test_best_prices_of_two_plans_are_where_their_lines_meet() -> None:
    cheap, small = (1.0, np.array([6.0])), (3.0, np.array([2.0]))
    used = np.stack([cheap[1], small[1]])
    prices, value = best_prices([cheap[0], small[0]], used, 4.0)
    assert prices == pytest.approx([0.5])
    assert value == pytest.approx(2.0)
    with_limit, _ = best_prices([cheap[0]], used[:1], 4.0, most=3.0)
    assert with_limit == pytest.approx([0.75])


def test_known_plans_do_not_change_what_is_proved() -> None:
    graph = random_graph(5, num_nodes=6, forbidden=0.0, num_live_sets=3)
    graph = with_budget(graph, 0.4)
    rows = [live_row(graph, live) for live in range(3)]
    free = solve(replace(graph, budget=None))
    assert graph.budget is not None
    first = solve_within_rows(graph, rows, graph.budget, gap=1e-3, free=free)
    known = [first.choices]
    again = solve_within_rows(
        graph, rows, graph.budget, gap=1e-3, free=free, known=known
    )
    assert again.cost == first.cost == pytest.approx(brute_force(graph).cost)
    assert again.bound <= first.cost


@pytest.mark.parametrize("seed", range(30))
def test_below_an_aim_the_bound_is_still_one_within_the_budget(seed: int) -> None:
    graph = random_graph(seed, num_nodes=5, forbidden=0.0, num_copies=0)
    rows = random_rows(graph, seed)
    peaks = {x: max(r.used(x) for r in rows) for x in every_assignment(graph)}
    budget, aim = np.quantile(list(peaks.values()), (0.6, 0.2)).tolist()
    best = min(graph.cost(x) for x, peak in peaks.items() if peak <= budget)
    place = graph, rows, budget
    found = solve_within_rows(*place, gap=1e-3, free=solve(graph), aim=aim)
    assert peaks[found.choices] <= aim
    assert found.bound <= best + 1e-7


@pytest.mark.parametrize(
    ("marginals", "beyond"),
    [
        ([3.0, 1.0, inf], [2.0, 0.0, inf]),
        ([-inf, 1.0, inf, -inf], [0.0, inf, inf, 0.0]),  # no bound came to be
        ([inf, inf], [0.0, 0.0]),
    ],
)
def test_likely_choices_are_told_where_bounds_are_infinite(
    marginals: list[float], beyond: list[float]
) -> None:
    np.testing.assert_array_equal(beyond_least(np.array(marginals)), beyond)


class _Stopped:
    """HiGHS, which rounding stops the first few times."""

    def __init__(self, model: Any, times: int) -> None:
        self._model, self.times_left, self.tolerances = model, times, []

    def getModelStatus(self) -> highspy.HighsModelStatus:
        _, tolerance = self._model.getOptionValue("primal_feasibility_tolerance")
        self.tolerances.append(tolerance)
        if self.times_left:
            self.times_left -= 1
            return highspy.HighsModelStatus.kUnknown
        return self._model.getModelStatus()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_program_that_rounding_stops_is_solved_again(times: int) -> None:
    graph = instance(3)
    everything = np.ones(graph.num_choices, bool)
    assert graph.budget is not None
    relaxation = Relaxation(graph, everything, graph.budget, size=100.0)
    before = relaxation.solve(everything)
    stopped = _Stopped(relaxation.model, times)
    relaxation.model = stopped
    again = relaxation.solve(everything)
    assert before is not None and again is not None
    assert again.value == pytest.approx(before.value)
    assert stopped.tolerances[0] < max(stopped.tolerances) <= 1e-7
    _, tolerance = stopped.getOptionValue("primal_feasibility_tolerance")
    assert tolerance == stopped.tolerances[0]  # the next one is as exact as before


@pytest.mark.parametrize("is_of_peak", [False, True])
def test_a_program_ends_where_its_value_is_enough_and_not_before(
    is_of_peak: bool,
) -> None:
    rng, num_ended = np.random.default_rng(0), 0
    sizes: dict[str, Any] = {"num_nodes": 40, "most_choices": 6, "density": 0.2}
    for seed in range(20):
        graph = random_graph(seed, forbidden=0.0, num_live_sets=4, **sizes)
        graph = with_budget(graph, 0.4)

        def program(graph: ChoiceGraph = graph) -> Relaxation:
            everything, budget = np.ones(graph.num_choices, bool), graph.budget or 0.0
            made = Relaxation(
                graph, everything, budget, size=50.0, minimises_peak=is_of_peak
            )
            for live in range(4):
                made.add_row(live_row(graph, live))
            return made

        again = program()
        first = again.solve(again.domain)
        assert first is not None
        enough = first.value + 0.002 * abs(first.value)
        for _ in range(10):
            part = again.domain & (rng.random(again.domain.size) < 0.95)
            found = again.solve(part, enough)
            if found is not None and not found.shares.size and found.value < inf:
                exact, num_ended = program().solve(part), num_ended + 1
                assert exact is not None
                assert found.value == enough <= exact.value + 1e-5
    assert num_ended > 1


def test_programs_of_few_choices_do_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program holds few of all choices, those that hold too much make room for
    those that fit: a plan is found, and its gap closes."""
    monkeypatch.setattr(budget, "MOST_PAIRS", 150)
    monkeypatch.setattr(budget, "MOST_LIKELY", 4)
    num_closed = 0
    for seed in range(6):
        graph = random_graph(
            *(seed,),
            num_nodes=50,
            most_choices=8,
            forbidden=0.0,
            density=0.15,
            num_live_sets=3,
        )
        graph = with_budget(graph, 0.25)
        assert graph.budget is not None
        rows = [live_row(graph, live) for live in range(3)]
        search = Search(graph, 1e-3, 1.0, ArrayPool())
        search.raise_bound(solve(replace(graph, budget=None)).bound)
        within = WithinRows(search, rows, graph.budget)
        assert num_pairs(within.graph, np.ones(within.graph.num_choices, bool)) > 150
        within.run([])
        assert search.choices is not None
        assert max(row.used(search.choices) for row in rows) <= graph.budget
        num_closed += search.cost - within.bound <= 0.01 * search.cost
    assert num_closed >= 5


@pytest.mark.parametrize("most_pairs", [10, 1000])
def test_what_rows_leave_may_not_go_together(
    monkeypatch: pytest.MonkeyPatch, most_pairs: int
) -> None:
    """Three nodes in a ring differ from each other; a third choice is too large."""
    monkeypatch.setattr(budget, "MOST_PAIRS", most_pairs)
    nodes = [Node("n", np.zeros(3), np.array([1.0, 1.0, 9.0])) for _ in range(3)]
    differ, same = np.where(np.eye(3) > 0, inf, 0.0), np.arange(3)
    ends = (0, 1), (1, 2), (2, 0)
    edges = [Edge(first, other, same, same, differ) for first, other in ends]
    graph = ChoiceGraph(nodes, edges)
    rows = [MemoryRow((0, 1, 2), tuple(node.bytes for node in nodes))]
    for limit, cost in ((11.0, 0.0), (10.0, None)):
        search = Search(graph, 1e-3, 10.0, ArrayPool())
        within = WithinRows(search, rows, limit)
        if cost is None:
            with pytest.raises(Infeasible) as raised:
                within.run([])
            least = raised.value.least_budget
            assert least == 11.0 if most_pairs == 1000 else least >= 11.0
        else:
            within.run([])
            assert search.cost == cost


@pytest.mark.parametrize("seed", range(20))
def test_where_rows_rule_all_out_the_bound_need_only_be_above_the_budget(
    seed: int,
) -> None:
    graph = random_graph(seed, num_nodes=5, forbidden=0.0, num_live_sets=3)
    rows = [live_row(graph, live) for live in range(3)]
    graph = replace(graph, live_sets=(), budget=None)
    allowed = [x for x in every_assignment(graph) if graph.cost(x) < inf]
    least = min(max(row.used(x) for row in rows) for x in allowed)
    free = solve(graph)
    for part in (0.99, 0.5):
        with pytest.raises(Infeasible) as raised:
            solve_within_rows(graph, rows, part * least, gap=1e-2, free=free)
        assert part * least < raised.value.least_budget_bound <= least
        assert raised.value.least_budget >= least
