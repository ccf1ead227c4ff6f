"""What rows and forbidden pairs leave: nothing goes that a plan within them makes."""

from math import inf

import numpy as np
import pytest

from autopar.solver.choice_graph import ChoiceGraph
from autopar.solver.memory_rows import MemoryRow
from autopar.solver.propagation import Propagation
from tests.solver.random_graphs import every_assignment, random_graph, random_rows


def propagation(graph: ChoiceGraph, rows: list[MemoryRow]) -> Propagation:
    result = Propagation(graph)
    for row in rows:
        result.add_row(row)
    return result


def everything(graph: ChoiceGraph) -> np.ndarray:
    return np.ones(graph.num_choices, bool)


def instance(seed: int) -> tuple[ChoiceGraph, list[MemoryRow], float, list[np.ndarray]]:
    """A graph, rows, a budget that binds, and the plans within it, as flat choices."""
    graph = random_graph(seed, num_nodes=5, forbidden=(0.0, 0.1, 0.3)[seed % 3])
    rows = random_rows(graph, seed)
    starts = graph.starts[:-1]
    peaks = {
        each: max(row.used(each) for row in rows)
        for each in every_assignment(graph)
        if graph.cost(each) < inf
    }
    least = min(peaks.values(), default=0.0)
    budget = least - 1 + seed % 4
    fitting = [starts + each for each, peak in peaks.items() if peak <= budget]
    return graph, rows, budget, fitting


def test_what_a_plan_within_rows_makes_is_left() -> None:
    num_narrowed = num_nothing = 0
    for seed in range(120):
        graph, rows, budget, fitting = instance(seed)
        left = propagation(graph, rows).left(everything(graph), budget)
        if left is None:
            assert not fitting, seed
            num_nothing += 1
            continue
        assert all(left[choices].all() for choices in fitting), seed
        again = propagation(graph, rows).left(left, budget)
        assert again is not None and (again == left).all(), seed
        num_narrowed += left.sum() < graph.num_choices / 2
    assert num_nothing >= 20
    assert num_narrowed >= 5


@pytest.mark.parametrize("constant, is_nothing", [(5.0, False), (5.1, True)])
def test_a_row_of_nothing_but_a_constant(constant: float, is_nothing: bool) -> None:
    graph = random_graph(0, forbidden=0.0)
    left = propagation(graph, [MemoryRow((), (), constant)])
    assert (left.left(everything(graph), 5.0) is None) == is_nothing


def test_of_a_domain_only_parts_are_left() -> None:
    graph, rows, _, _ = instance(0)
    domain = np.random.default_rng(0).random(graph.num_choices) < 0.8
    left = propagation(graph, rows).left(domain, 1e9)
    assert left is None or not (left & ~domain).any()
