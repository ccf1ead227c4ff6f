"""Integer programs beside brute force: bound <= best <= plan, however soon they end."""

from math import inf

import numpy as np
import pytest

from autopar.solver.choice_graph import ChoiceGraph
from autopar.solver.memory_rows import MemoryRow
from autopar.solver.relaxation import Relaxation
from autopar.solver.whole import solve_whole
from tests.solver.random_graphs import every_assignment, random_graph, random_rows

GAP = 1e-3


def instance(seed: int) -> tuple[ChoiceGraph, list[MemoryRow], float, dict]:
    """A graph, rows, a budget that binds, and what each plan within it costs."""
    graph = random_graph(seed, num_nodes=6, num_copies=0, forbidden=0.05)
    rows = random_rows(graph, seed)
    costs = {x: graph.cost(x) for x in every_assignment(graph)}
    costs = {x: cost for x, cost in costs.items() if cost < inf}
    peaks = {x: max(row.used(x) for row in rows) for x in costs}
    each = sorted(peaks.values())
    budget = max(each[seed % 8 * len(each) // 50] if each else 0.0, 1.0)
    fitting = {x: cost for x, cost in costs.items() if peaks[x] <= budget}
    return graph, rows, budget, fitting


def program(graph: ChoiceGraph, rows: list[MemoryRow], budget: float) -> Relaxation:
    result = Relaxation(graph, np.ones(graph.num_choices, bool), budget, size=50.0)
    for row in rows:
        result.add_row(row)
    return result


def made_by(graph: ChoiceGraph, choices: tuple[int, ...]) -> np.ndarray:
    starts = graph.starts[:-1]
    made = np.zeros(graph.num_choices, bool)
    made[starts + np.array(choices)] = True
    return made


@pytest.mark.parametrize("presolves", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_the_best_plan_and_a_bound_below_it(seed: int, presolves: bool) -> None:
    graph, rows, budget, fitting = instance(seed)
    found = solve_whole(program(graph, rows, budget), gap=GAP, presolves=presolves)
    if not fitting:
        assert (found.choices, found.bound) == (None, inf)
        return
    best = min(fitting.values())
    assert found.choices in fitting
    assert found.bound <= best + 1e-6 * abs(best)
    assert best <= fitting[found.choices] <= best + GAP * abs(best) + 1e-6
    again = solve_whole(program(graph, rows, budget), gap=GAP, presolves=presolves)
    assert again == found


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6, 7, 9])
def test_one_that_ends_at_once_has_a_bound_and_the_plan_it_started_from(
    seed: int,
) -> None:
    graph, rows, budget, fitting = instance(seed)
    known = max(fitting, key=lambda x: fitting[x])
    found = solve_whole(
        program(graph, rows, budget),
        gap=0.0,
        most_checks=1,
        start=made_by(graph, known),
    )
    assert found.choices in fitting
    assert fitting[found.choices] <= fitting[known]
    assert found.bound <= min(fitting.values()) + 1e-6


def test_a_plan_that_is_enough_ends_it() -> None:
    graph, rows, budget, fitting = instance(3)
    known = max(fitting, key=lambda x: fitting[x])
    found = solve_whole(
        program(graph, rows, budget),
        gap=0.0,
        start=made_by(graph, known),
        enough=fitting[known],
    )
    assert found.choices in fitting and fitting[found.choices] <= fitting[known]
    assert found.bound <= min(fitting.values())


@pytest.mark.parametrize("constant, best", [(1.0, 7.0), (3.0, None)])
def test_a_graph_of_nothing(constant: float, best: float | None) -> None:
    graph = ChoiceGraph((), (), constant=7.0)
    found = solve_whole(program(graph, [MemoryRow((), (), constant)], 2.0), gap=GAP)
    assert found.choices == (None if best is None else ())
    assert found.bound == (inf if best is None else best)
