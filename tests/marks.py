"""Marks of cases."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrised test that runs in `make test-all` only."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
