"""How many seeds a test draws: a few in each run, the rest in `make test-all`."""

import pytest

from tests.marks import slow


def drawn(quick: int, thorough: int) -> pytest.MarkDecorator:
    """Parametrises a test by its `seeds`."""
    seeds = [range(quick), slow(range(thorough))]
    return pytest.mark.parametrize("seeds", seeds, ids=len)
