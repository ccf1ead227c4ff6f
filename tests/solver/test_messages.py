"""Messages where no plan is known yet."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from autopar.solver import messages
from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from autopar.solver.messages import Passing
from autopar.solver.reduce import reduce
from tests.solver.random_graphs import random_graph


def colouring(seed: int) -> ChoiceGraph:
    """Nodes of three colours, those of an edge different; one colouring is there."""
    random = np.random.default_rng(seed)
    hidden, own = random.integers(0, 3, 40), np.arange(3)
    matrix = np.where(np.eye(3, dtype=bool), inf, 0.0)
    pairs = [(i, j) for i in range(40) for j in range(i) if hidden[i] != hidden[j]]
    chosen = random.choice(len(pairs), 90, replace=False).tolist()
    return ChoiceGraph(
        tuple(Node(str(i), random.random(3), np.zeros(3)) for i in range(40)),
        tuple(Edge(i, j, own, own, matrix) for i, j in map(pairs.__getitem__, chosen)),
    )


def test_messages_go_on_until_there_is_a_plan() -> None:
    """Where rounding comes by forbidden pairs only, no gap is closed."""
    num_without = 0
    for seed in range(8):
        passing = Passing(colouring(seed))
        is_finished = passing.run(1e-9, max_rounds=1)
        assert is_finished is (passing.bound >= passing.best_cost * (1 - 1e-9))
        if passing.best is None:
            num_without += 1
            passing.run(1e-9, max_rounds=9)
            assert passing.num_rounds > 2
    assert num_without > 2


def test_edges_send_the_same_alone_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (4, 6):  # which leave 12 and 10 nodes, edges of 4 to 20 entries
        whole = random_graph(
            seed, num_nodes=14, most_choices=6, density=1.0, forbidden=0.0
        )
        graph, found = reduce(whole).graph, []
        for few in (messages.FEW_ENTRIES, 12, 0):  # all, some and none go together
            monkeypatch.setattr(messages, "FEW_ENTRIES", few)
            passing = Passing(graph)
            passing.run(0.0, max_rounds=5)
            found.append(np.append(np.concatenate(passing.marginals()), passing.bound))
        assert len(graph.nodes) >= 10
        np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
        np.testing.assert_allclose(found[2], found[0], rtol=1e-12)
