"""The high half of a product of integers, of every width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.rules.high_product import high_product
from tests.rules.strategy_oracle import check_every_strategy

DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_that_of_long_integers(dtype: str) -> None:
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    random = np.random.default_rng(0)
    x, y = random.integers(least, greatest, (2, 200), dtype, endpoint=True)
    x[:3], y[:3] = (least, least, greatest), (least, greatest, greatest)
    bits = 8 * np.dtype(dtype).itemsize
    expected = [int(a) * int(b) >> bits for a, b in zip(x, y, strict=True)]
    with jax.enable_x64(True):
        found = high_product(jnp.asarray(x), jnp.asarray(y))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array(expected, dtype))


def test_every_strategy() -> None:
    x = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 8), np.int32)
    reached = check_every_strategy(lambda x: lax.mulhi(x, x + 1), x, kinds=("mulhi",))
    assert reached["mulhi"] == {"-", "d0", "d1"}
