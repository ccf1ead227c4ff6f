"""Microbatches and stages leave the state that the full batch leaves on one device."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import autopar

from .trainings import (
    Training,
    assert_trains_as_one_device,
    decoder,
    encoder_decoder,
    perceptron,
)

NUM_STEPS = 3

MODELS: dict[str, Callable[[], Training]] = {
    "gpt": decoder,
    "gpt_tied": lambda: decoder(tied=True),
    "gpt_scanned": lambda: decoder(scan_layers=True),
    "gpt_scanned_tied": lambda: decoder(scan_layers=True, tied=True),
    "mlp": perceptron,
    "encoder_decoder": encoder_decoder,
}
METHODS: dict[str, Any] = {
    "1_microbatch": autopar.ShardParallel(),
    "2_microbatches": autopar.ShardParallel(num_microbatches=2),
    "4_microbatches": autopar.ShardParallel(num_microbatches=4),
    "2_stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "4_stages": autopar.PipelineParallel(num_stages=4, num_microbatches=4),
}
QUICK = [("mlp", "2_microbatches")]  # of stages: test_pipeline_cover.py


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(MODELS, METHODS)
    ],
)
def test_the_whole_state_is_that_of_the_full_batch(model: str, method: str) -> None:
    assert_trains_as_one_device(MODELS[model](), NUM_STEPS, method=METHODS[method])
