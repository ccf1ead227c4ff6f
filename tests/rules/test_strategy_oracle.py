"""The oracle itself: it must catch rules that are wrong, and reach every factor."""

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.graph.op_graph import Operator
from autopar.rules import base
from autopar.rules.base import Factor, Rule, linear
from autopar.sharding.spec import MAX, REPLICATED, SUM
from tests.rules.strategy_oracle import MESH_2X4, check_every_strategy, evaluate

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def as_rule(*factors: Factor) -> Rule:
    return Rule(lambda op: list(factors))


@pytest.mark.parametrize(
    "wrong",
    [
        as_rule(Factor("reads another dim", (0,), (1,), 4)),
        as_rule(Factor("forgets to split", (REPLICATED,), (0,), 4)),
        as_rule(Factor("forgets to reduce", (0,), (REPLICATED,), 4)),
        as_rule(Factor("sums copies", (REPLICATED,), (SUM,), 0)),
        as_rule(Factor("is not linear", (SUM,), (SUM,), 0)),
        as_rule(Factor("takes a maximum of sums", (SUM,), (MAX,), 0)),
    ],
)
def test_wrong_rules_are_caught(monkeypatch: pytest.MonkeyPatch, wrong: Rule) -> None:
    monkeypatch.setitem(base._RULES, "exp", wrong)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        check_every_strategy(jnp.exp, X)


def test_a_factor_that_splits_what_it_should_not_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def factors(op: Operator) -> list[Factor]:
        return [Factor("split axis", (1,), (1,), 8), linear(op, (0,))]

    monkeypatch.setitem(base._RULES, "cumsum", Rule(factors))
    with pytest.raises(AssertionError, match="strategy"):
        check_every_strategy(lambda x: jnp.cumsum(x, 1), X, kinds=("cumsum",))


def test_every_factor_is_reached_in_a_sample() -> None:
    reached = check_every_strategy(jnp.add, X, X, mesh=MESH_2X4, max_strategies=2)
    assert reached == {"add": {"-", "d0", "d1", "sum0,1"}}


def test_a_kind_that_does_not_occur_is_an_error() -> None:
    with pytest.raises(AssertionError, match="holds none of"):
        check_every_strategy(jnp.exp, X, kinds=("sin",))


def test_calls_are_inlined() -> None:
    found = evaluate(lambda x: jnp.where(x > 3, jnp.cumsum(x), 0.0), X[0])
    assert "cumsum" in [evaluated.operator.kind for evaluated in found]
