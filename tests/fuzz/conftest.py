"""Programs at random are compiled as those of users: some met failures of XLA."""

import pytest


@pytest.fixture(autouse=True)
def _usual_code_generator(usual_code_generator: None) -> None:
    pass
