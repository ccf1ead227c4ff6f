"""Each run checks a few strategies of every operator, `make test-all` many more."""

import pytest

from tests.rules import strategy_oracle


@pytest.fixture(autouse=True)
def _few_strategies(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "not slow" in (request.config.getoption("markexpr") or ""):
        monkeypatch.setattr(strategy_oracle, "MOST_STRATEGIES", 6)
