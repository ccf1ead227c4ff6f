"""How many seeds a test draws: a few in each run, the rest in `make test-all`."""

import pytest


def drawn(quick: int, thorough: int) -> pytest.MarkDecorator:
    """Parametrises a test by its `seeds`."""
    rest = pytest.param(range(thorough), marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [range(quick), rest], ids=len)
