"""The oracle finds what it is there to find: wrong rules, and plans not kept to."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.graph.op_graph import Operator
from autopar.rules import base
from autopar.rules.base import Factor, Rule
from autopar.sharding.mesh import MeshShape
from tests.fuzz import plans
from tests.fuzz.oracle import (
    WrongProgram,
    check_case,
    reference_of,
    reference_of_function,
)
from tests.fuzz.plans import Case, case_reaching
from tests.fuzz.programs import Argument, Line, Program
from tests.fuzz.reduce import reduced

MESH = MeshShape(("x", "y"), (2, 2))
CASES = [Case(MESH, "uniform", seed) for seed in range(8)]


@pytest.fixture
def rules() -> Iterator[dict[str, Rule]]:
    """The table of rules, to be changed until the test ends."""
    before = dict(base._RULES)
    yield base._RULES
    base._RULES.clear()
    base._RULES.update(before)


def program(*texts: str) -> Program:
    """A program of lines that each read the one before, the first `v0`."""
    lines = [
        Line("given", f"v{i + 1} = {text.format(f'v{i}')}", (f"v{i}",), (f"v{i + 1}",))
        for i, text in enumerate(texts)
    ]
    argument = Argument("v0", (8, 4), "float32")
    return Program((argument,), tuple(lines), (f"v{len(texts)}",))


CUMSUM = program("jnp.sin({})", "lax.cumsum({}, 0)", "jnp.cos({})")


def cut_along_everything(op: Operator) -> list[Factor]:
    return [Factor(f"d{d}", (d,), (d,), n) for d, n in enumerate((8, 4))]


def check(wanted: Program) -> list[str]:
    """Messages of the cases that fail."""
    found = []
    for case in CASES:
        try:
            check_case(reference_of(wanted), case)
        except WrongProgram as error:
            found.append(str(error))
    return found


def test_right_rules_pass() -> None:
    assert not check(CUMSUM)


def test_a_wrong_rule_is_found_and_reduced(rules: dict[str, Rule]) -> None:
    rules["cumsum"] = Rule(cut_along_everything)
    messages = check(CUMSUM)
    assert any("differs by" in message for message in messages)
    failing = next(case for case in CASES if _fails(CUMSUM, case))
    smaller, _ = reduced(CUMSUM, failing, seconds=30.0)
    assert any("cumsum" in line.text for line in smaller.lines)
    assert len(smaller.lines) < len(CUMSUM.lines)


def test_a_wrong_replica_is_found(rules: dict[str, Rule]) -> None:
    """Devices that must agree are all compared, not only the first."""

    def only_first_is_right(op, operands, shard):  # type: ignore[no-untyped-def]
        first = shard.is_first(range(shard.mesh.num_axes))
        return [base.bind_params(op, operands)[0] * first]

    rules["cumsum"] = Rule(lambda op: [], only_first_is_right)
    assert check(program("lax.cumsum({}, 0)"))


@pytest.mark.parametrize("text", ["2.0", "jnp.full((0, 4), 2.0)"])
def test_a_result_that_forgets_its_weak_type_is_found(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not check(program(text))
    monkeypatch.setattr(plans, "weak_outputs", lambda traced: ())
    assert all("weak float32" in message for message in check(program(text)))
    assert len(check(program(text))) == len(CASES)


def noisy(value: np.ndarray) -> Callable[[float, int], list[np.ndarray]]:
    """One argument, moved as those of random programs are."""

    def values(noise: float, draw: int) -> list[np.ndarray]:
        moves = np.random.default_rng(draw).normal(size=value.shape)
        return [(value * (1 + noise * moves)).astype(value.dtype)]

    return values


def test_a_value_at_a_jump_is_unstable() -> None:
    """What rounding does to it takes it to another float of 10 bits, or not."""
    values = noisy(np.array([3.1884766], np.float32))
    at_jump = reference_of_function(lambda x: lax.reduce_precision(x, 5, 10), values)
    assert not at_jump.is_stable(0, 1e-5)
    assert reference_of_function(jnp.sin, values).is_stable(0, 1e-5)


def divided_by_zero(x: jax.Array) -> jax.Array:
    return jnp.sum(x, 1) / jnp.floor(0 * x[:, 0])


@pytest.mark.parametrize(
    ("function", "is_right"),
    [(divided_by_zero, True), (lambda x: 1 / divided_by_zero(x), False)],
)
def test_infinity_may_become_nan_and_nothing_finite(
    function: Callable[..., Any], is_right: bool
) -> None:
    reference = reference_of_function(function, noisy(np.ones((8, 4), np.float32)))
    verdicts = set()
    for case in CASES:
        try:
            verdicts.add(check_case(reference, case).verdict)
        except WrongProgram:
            verdicts.add("wrong")
    assert verdicts == {"right", "unstable" if is_right else "wrong"}


@pytest.mark.parametrize("factor", ["d1", "sum0", "-"])
def test_a_plan_is_led_to_the_strategy_that_is_missing(factor: str) -> None:
    reference = reference_of(CUMSUM)
    seen = check_case(reference, CASES[0]).seen
    missing = ("cumsum", factor)
    case = case_reaching(reference.traced, CASES[0], seen - {missing})
    assert missing in check_case(reference, case).reached
    assert case_reaching(reference.traced, CASES[0], seen) == CASES[0]


def test_an_axis_of_one_device_reaches_nothing() -> None:
    case = Case(MeshShape(("x", "y"), (1, 1)), "uniform", 0)
    outcome = check_case(reference_of(CUMSUM), case)
    assert not outcome.reached
    assert ("cumsum", "d1") in outcome.seen


def _fails(wanted: Program, case: Case) -> bool:
    try:
        check_case(reference_of(wanted), case)
    except WrongProgram:
        return True
    return False
