"""conv_general_dilated: batch, features, groups and patches, forward and backward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.graph.op_graph import Operator
from autopar.rules import conv  # noqa: F401
from autopar.rules.base import factors_of
from autopar.sharding.spec import REPLICATED, SUM
from tests.rules.strategy_oracle import (
    check_every_strategy,
    factor_table,
    operator_of,
    operators_of,
)

KIND = "conv_general_dilated"
NHWC = ("NHWC", "HWIO", "NHWC")


def random_array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def both_gradients(
    convolve: Callable[..., jax.Array], left: np.ndarray, right: np.ndarray
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Forward, and the gradients by both operands of a weighted sum of the result."""
    shape = jax.eval_shape(convolve, left, right).shape
    weights = random_array(*shape, seed=2)
    return jax.grad(lambda x, w: jnp.sum(convolve(x, w) ** 2 * weights), (0, 1))


def test_factors_of_a_plain_convolution() -> None:
    op = operator_of(
        KIND,
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=NHWC
        ),
        random_array(2, 8, 8, 4),
        random_array(3, 3, 4, 6),
    )
    assert factor_table(op) == {
        "batch": ((0, REPLICATED), (0,)),
        "in_features": ((3, 2), (SUM,)),
        "out_features": ((REPLICATED, 3), (3,)),
        "window1": ((1, REPLICATED), (1,)),
        "window2": ((2, REPLICATED), (2,)),
        "sum0": ((SUM, REPLICATED), (SUM,)),
        "sum1": ((REPLICATED, SUM), (SUM,)),
    }


@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [
        ((1, 1), "SAME", 1),
        ((2, 2), "SAME", 1),
        ((2, 1), "VALID", 1),
        ((1, 1), "SAME", 2),
    ],
)
def test_forward_and_gradients(
    strides: tuple[int, int], padding: str, dilation: int
) -> None:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, strides, padding, None, (dilation,) * 2, NHWC
        )

    operands = random_array(8, 8, 6, 4), random_array(3, 3, 4, 8, seed=1)
    reached = check_every_strategy(
        both_gradients(convolve, *operands), *operands, kinds=(KIND,), max_strategies=16
    )
    assert {"batch", "in_features", "out_features", "sum0", "sum1"} <= reached[KIND]


@pytest.mark.parametrize(("groups", "out_features"), [(4, 8), (8, 8), (8, 16)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_grouped_and_depthwise(groups: int, out_features: int, stride: int) -> None:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            (stride,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    x, w = random_array(4, 6, 8), random_array(3, 8 // groups, out_features, seed=1)
    reached = check_every_strategy(
        both_gradients(convolve, x, w), x, w, kinds=(KIND,), max_strategies=16
    )
    assert {"batch", "feature_groups", "batch_groups", "in_features"} <= reached[KIND]


def test_groups_are_split_no_further_than_their_number() -> None:
    op = operator_of(
        KIND,
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", feature_group_count=2
        ),
        random_array(4, 8, 6),
        random_array(8, 4, 3),
    )
    others = {"batch", "sum0", "sum1", "window2"}
    assert set(factor_table(op)) == {"feature_groups", *others}
    reached = check_every_strategy(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", batch_group_count=4),
        random_array(8, 4, 6),
        random_array(8, 4, 3),
        kinds=(KIND,),
    )
    others = {"in_features", "sum0", "sum1", "window2"}
    assert reached[KIND] == {"-", "batch_groups", *others}


@pytest.mark.parametrize("patch", [1, 4])
def test_patches_are_split_without_a_halo(patch: int) -> None:
    def embed(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (patch, patch), "VALID", dimension_numbers=NHWC
        )

    x, w = random_array(2, 4 * patch, 2 * patch, 4), random_array(patch, patch, 4, 2)
    reached = check_every_strategy(
        both_gradients(embed, x, w), x, w, kinds=(KIND,), max_strategies=16
    )
    assert {"window1", "window2"} <= reached[KIND]
    backward = operators_of(both_gradients(embed, x, w), x, w)
    for factor in (f for op in backward for f in factors_of(op)):
        assert all(halo.before <= 0 >= halo.after for halo in factor.halos)
    assert len([op for op in backward if _sums_patches(op)]) == 1


def _sums_patches(op: Operator) -> bool:
    """Whether the patches are contracted: the gradient by the kernel."""
    factor = factor_table(op).get("taps1") if op.kind == KIND else None
    return factor is not None and factor[1] == (SUM,)
