"""Rules bind right where the axes of a dim are in another order than the mesh's."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.graph.op_graph import Operator
from autopar.planner.axis_orders import Orders, strategies_in_orders
from autopar.planner.strategies import enumerate_strategies
from autopar.rules.base import rule_of
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import TURN, Spec, axes_of_dim
from tests.rules.strategy_oracle import (
    MESH_2X2X2,
    MESH_2X4,
    Evaluated,
    Strategy,
    check_cases,
    evaluate,
    operator_of,
    random_array,
)

X, W = random_array(16, 8), random_array(8, 16, seed=1)
KEY, ROWS = jax.random.key(0), np.arange(16, dtype=np.int32)[::-1].reshape(8, 2)
IMAGES, KERNEL = random_array(8, 8, 8, 8), random_array(8, 8, 3, 3, seed=1)
ORDERS_2X4: Orders = frozenset({(1, 0)})
ORDERS_2X2X2: Orders = frozenset({(2, 0), (1, 0), (2, 1, 0), (1, 2, 0)})
CASES: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.where(x > 0, x, 2 * y) + y[:, :1], X, -X),
    "product": (jnp.matmul, X, W),
    "reduced": (lambda x: (x.sum(0), x.max(1), jnp.argmin(x, 0)), X),
    "moved": (lambda x: (x.T, x[:, None], x.reshape(8, 2, 8), jnp.tile(x, 2)), X),
    "counted": (lambda: lax.broadcasted_iota(np.int32, (16, 8), 0),),
    "random": (lambda key: jax.random.bits(key, (16, 8)), KEY),
    "gathered": (lambda x, i: x[i], X, ROWS),
    "scattered": (lambda x, i: x.at[i].add(1.0), X, ROWS),
    "convolved": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), IMAGES, KERNEL),
}


@dataclass(frozen=True)
class OrderedStrategy(Strategy):
    """Factors do not say in which order their axes are, so it has its specs."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]

    def operand_specs(self) -> tuple[Spec, ...]:
        return self.operands

    def result_specs(self) -> tuple[Spec, ...]:
        return self.results


def in_other_orders(
    op: Operator, mesh: MeshShape, orders: Orders
) -> list[OrderedStrategy]:
    """What an operator has besides where a step names `orders`."""
    found = strategies_in_orders(op, enumerate_strategies(op, mesh), orders)
    both = [
        [tuple(map(tuple, each)) for each in specs.tolist()]
        for specs in (found.operand_specs, found.result_specs)
    ]
    return [
        OrderedStrategy(found.chosen(row), operands, results)
        for row, (operands, results) in enumerate(zip(*both, strict=True))
        if any(state >= TURN for spec in (*operands, *results) for state in spec)
    ]


@pytest.mark.parametrize(
    ("mesh", "orders"),
    [(MESH_2X4, ORDERS_2X4), (MESH_2X2X2, ORDERS_2X2X2)],
    ids=["2x4", "2x2x2"],
)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_device(
    name: str, mesh: MeshShape, orders: Orders
) -> None:
    function, *args = CASES[name]
    cases: list[tuple[Evaluated, Strategy]] = []
    for evaluated in evaluate(function, *args):
        if rule_of(evaluated.operator) is not None:
            found = in_other_orders(evaluated.operator, mesh, orders)
            chosen = random.Random(0).sample(found, min(6, len(found)))
            cases += [(evaluated, strategy) for strategy in chosen]
    assert cases
    check_cases(cases, mesh)


def test_a_product_has_its_rows_in_either_order() -> None:
    op = operator_of("dot_general", jnp.matmul, X, W)
    found = in_other_orders(op, MESH_2X4, ORDERS_2X4)
    assert {strategy.factors[0].name for strategy in found} == {"m0", "n1", "k0"}
    (by_rows,) = (s for s in found if s.factors[0].name == "m0")
    (left, right), (result,) = by_rows.operands, by_rows.results
    assert axes_of_dim(left, 0) == axes_of_dim(result, 0) == (1, 0)
    assert right == (-1, -1)


def test_windows_that_exchange_halos_keep_mesh_order() -> None:
    function, *args = CASES["convolved"]
    op = operator_of("conv_general_dilated", function, *args)
    found = in_other_orders(op, MESH_2X4, ORDERS_2X4)
    assert found
    assert not any(factor.halos for s in found for factor in s.factors)


def test_without_other_orders_there_are_no_other_strategies() -> None:
    op = operator_of("dot_general", jnp.matmul, X, W)
    assert in_other_orders(op, MESH_2X2X2, frozenset()) == []
