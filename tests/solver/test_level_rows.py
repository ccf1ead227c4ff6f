"""Rows of plans whose layers differ say the same of equal layers."""

import numpy as np
import pytest

from autopar.solver.level_rows import Weighed, levelled
from autopar.solver.memory_rows import MemoryRow

NUM_LAYERS, POINT, NUM_CHOICES = 9, 5, 3
LAYERS = np.arange(2 * NUM_LAYERS).reshape(NUM_LAYERS, 2) + 1  # node 0 is in none
# By choice of a layer's first node: what both hold before the point, and behind it.
HELD = {0: (4.0, 1.0), 2: (9.0, 0.0)}


def weighed_of(own: list[int]) -> Weighed:
    """As a plan tells it: of other choices than its own not what they would hold."""
    by_layer = {
        (choice, side): np.where(np.arange(NUM_CHOICES) == choice, held[side], 2.0)
        for choice, held in HELD.items()
        for side in (0, 1)
    }
    weights, less = {0: np.array([7.0, 8.0])}, dict[int, float]()
    for layer, (first, second) in enumerate(LAYERS.tolist()):
        choice = own[first]
        if layer == POINT:
            weights[first] = np.array([100.0, 200.0, 300.0])
            continue
        weights[first] = by_layer[choice, int(layer > POINT)] + choice
        weights[second] = np.full(NUM_CHOICES, 3.0)
        if choice:
            less[first] = float(choice)
    return Weighed(weights, less, LAYERS.size + 1)


def row_of(weighed: Weighed) -> MemoryRow:
    weights, constant = dict(weighed.weights), -sum(weighed.less.values())
    return MemoryRow(tuple(weights), tuple(weights.values()), constant)


def level_row(own: list[int]) -> MemoryRow:
    weights, constant = levelled(weighed_of(own), own, LAYERS)
    return MemoryRow(tuple(weights), tuple(weights.values()), constant)


def plan_of(layers: list[int]) -> list[int]:
    return [1, *(choice for layer in layers for choice in (layer, 1))]


@pytest.mark.parametrize("seed", range(20))
def test_a_level_row_says_of_its_own_plan_what_it_said(seed: int) -> None:
    own = plan_of(np.random.default_rng(seed).choice([0, 2], NUM_LAYERS).tolist())
    said = row_of(weighed_of(own)).used(own)
    assert level_row(own).used(own) == pytest.approx(said)
    assert all((held >= 0).all() for held in level_row(own).weights)


def test_it_knows_what_other_orders_of_the_layers_hold() -> None:
    own = plan_of([0, 2, 0, 2, 0, 2, 0, 2, 0])
    swapped = plan_of([2, 0, 0, 0, 2, 2, 2, 0, 0])
    truth = row_of(weighed_of(swapped)).used(swapped)
    assert row_of(weighed_of(own)).used(swapped) != pytest.approx(truth)
    assert level_row(own).used(swapped) == pytest.approx(truth)
    fewer = plan_of([0, 0, 0, 0, 0, 2, 2, 2, 0])
    assert level_row(own).used(fewer) == pytest.approx(
        row_of(weighed_of(fewer)).used(fewer)
    )


def test_layers_before_the_point_weigh_alike_and_those_behind_it() -> None:
    row = level_row(plan_of([0, 2, 0, 2, 0, 2, 0, 2, 0]))
    held = dict(zip(row.nodes, row.weights, strict=True))
    first = [held[node] for node in LAYERS[:, 0].tolist()]
    assert all(each is first[0] for each in first[:POINT])
    assert all(each is first[-1] for each in first[POINT + 1 :])
    assert not np.array_equal(first[0], first[-1])


def test_rows_that_say_the_same_of_all_layers_are_left() -> None:
    weights = dict.fromkeys(LAYERS[:, 0].tolist(), np.array([1.0, 5.0]))
    found, constant = levelled(Weighed(weights, {}, 19), [0] * 19, LAYERS)
    assert constant == 0 and found == weights
