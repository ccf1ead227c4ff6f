"""dot_general: parallel batch and free dims, reductions over contracted ones."""

import jax
import jax.numpy as jnp
import pytest

from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    MESH_2X4,
    check_every_strategy,
    factor_table,
    operator_of,
    random_array,
)


def test_factors_of_a_batched_product() -> None:
    op = operator_of(
        "dot_general",
        lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b),
        random_array(2, 4, 8),
        random_array(2, 8, 6),
    )
    table = factor_table(op)
    assert table["b0"] == ((0, 0), (0,))
    assert table["k0"] == ((2, 1), (SUM,))
    assert table["sum0"] == ((SUM, REPLICATED), (SUM,))
    assert table["m1"] == ((1, REPLICATED), (1,))
    assert table["n2"] == ((REPLICATED, 2), (2,))


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("mk,kn->mn", (8, 4), (4, 8)),
        ("bmk,bkn->bmn", (2, 4, 8), (2, 8, 6)),
        ("bshd,bthd->bhst", (2, 4, 2, 4), (2, 4, 2, 4)),
        ("k,k->", (8,), (8,)),
        ("abk,kl->abl", (1, 3, 8), (8, 5)),
        ("ab,ab->", (4, 4), (4, 4)),
    ],
)
def test_every_strategy(equation: str, left: tuple, right: tuple) -> None:
    reached = check_every_strategy(
        lambda a, b: jnp.einsum(equation, a, b),
        random_array(*left),
        random_array(*right, seed=1),
        kinds=("dot_general",),
    )
    assert {"k0", "sum0", "sum1"} <= reached["dot_general"]


def test_on_unequal_axes_in_bfloat16() -> None:
    a = jnp.asarray(random_array(8, 16), jnp.bfloat16)
    check_every_strategy(jax.lax.dot, a, a.T, mesh=MESH_2X4)
