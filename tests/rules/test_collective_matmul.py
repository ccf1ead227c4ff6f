"""Products whose operand or sum goes around a ring of devices in parts."""

import jax
import jax.numpy as jnp
import pytest

from autopar.planner.strategies import enumerate_strategies
from autopar.rules.base import factors_of
from autopar.rules.collective_matmul import ring_bytes, rotations
from tests.rules.strategy_oracle import (
    MESH_2X4,
    MESH_8,
    check_every_strategy,
    operator_of,
    random_array,
)


def product(equation: str, *shapes: tuple[int, ...]):
    arrays = [random_array(*shape, seed=i) for i, shape in enumerate(shapes)]
    return operator_of("dot_general", lambda a, b: jnp.einsum(equation, a, b), *arrays)


def test_what_may_go_around_in_a_product_of_matrices() -> None:
    op = product("mk,kn->mn", (8, 16), (16, 32))
    rings = {
        factor.name: (factor.operands, factor.results, factor.size)
        for factor in factors_of(op, rotating=True)
        if factor.rotation is not None
    }
    assert rings == {
        # The right operand arrives by columns, or by what is contracted.
        "ring:m0:n1": ((0, 1), (0,), 8),
        "ring:m0:k0": ((0, 0), (0,), 8),
        # The left one.
        "ring:n1:m0": ((0, 1), (1,), 8),
        "ring:n1:k0": ((1, 1), (1,), 16),
        # The sum leaves by rows, or by columns.
        "ring:k0:m0": ((1, 0), (0,), 8),
        "ring:k0:n1": ((1, 0), (1,), 16),
    }


def test_rings_are_not_offered_unasked() -> None:
    op = product("mk,kn->mn", (8, 16), (16, 32))
    assert all(factor.rotation is None for factor in factors_of(op))
    names = {f.name for f in enumerate_strategies(op, MESH_8).factors}
    assert not any(name.startswith("ring:") for name in names)


def test_one_ring_whose_dim_no_other_axis_splits() -> None:
    op = product("mk,kn->mn", (8, 16), (16, 32))
    strategies = enumerate_strategies(op, MESH_2X4, rotating=True)
    rings = 0
    for row in range(len(strategies)):
        turns = [f.rotation for f in strategies.chosen(row) if f.rotation is not None]
        assert len(turns) <= 1
        for turn in turns:
            rings += 1
            spec = strategies.result_specs[row, 0]
            if turn.operand is not None:
                spec = strategies.operand_specs[row, turn.operand]
            assert (spec == turn.dim).sum() == 1
    assert rings


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("mk,kn->mn", (16, 8), (8, 24)),
        ("bmk,bkn->bmn", (4, 8, 8), (4, 8, 8)),
        ("bsh,hnd->bsnd", (4, 8, 8), (8, 4, 8)),
    ],
)
def test_every_ring_multiplies_as_one_device(
    equation: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    reached = check_every_strategy(
        lambda a, b: jnp.einsum(equation, a, b),
        random_array(*left),
        random_array(*right, seed=1),
        mesh=MESH_2X4,
        kinds=("dot_general",),
        rings=True,
        max_strategies=20,
    )
    op = product(equation, left, right)
    wanted = {f.name for f in factors_of(op, rotating=True) if f.rotation is not None}
    assert wanted and wanted <= reached["dot_general"]


def test_parts_of_narrow_types() -> None:
    a = jnp.asarray(random_array(8, 8), jnp.bfloat16)
    check_every_strategy(
        jax.lax.dot, a, a.T, mesh=MESH_8, kinds=("dot_general",), rings=True
    )


def test_what_is_sent_is_what_a_gather_or_a_scatter_sends() -> None:
    op = product("mk,kn->mn", (8, 16), (16, 32))
    by_name = {factor.name: factor for factor in factors_of(op, rotating=True)}
    sent = {
        name: [each.bytes for each in rotations(op, (factor,), (8,))]
        for name, factor in by_name.items()
    }
    left, right, result = 8 * 16 * 4 // 8, 16 * 32 * 4 // 8, 8 * 32 * 4 // 8
    assert sent["ring:n1:m0"] == sent["ring:n1:k0"] == [left] * 7
    assert sent["ring:m0:n1"] == sent["ring:m0:k0"] == [right] * 7
    assert sent["ring:k0:m0"] == sent["ring:k0:n1"] == [result] * 7
    assert sent["m0"] == sent["k0"] == []
    (each, *_) = rotations(op, (by_name["ring:n1:m0"],), (8,))
    assert each.pairs(MESH_8) == ((0, 7), *((i, i - 1) for i in range(1, 8)))
    (each, *_) = rotations(op, (by_name["ring:k0:m0"],), (8,))
    assert each.pairs(MESH_8) == (*((i, i + 1) for i in range(7)), (7, 0))


def test_two_parts_and_a_product_are_held() -> None:
    op = product("mk,kn->mn", (8, 16), (16, 32))
    by_name = {factor.name: factor for factor in factors_of(op, rotating=True)}
    part, rows = 8 * 16 * 4 // 8, 8 * 32 * 4 // 8 // 8
    assert ring_bytes(op, (by_name["ring:n1:m0"],), (8,)) == 2 * part + rows
    assert ring_bytes(op, (by_name["n1"],), (8,)) == 0
