"""Every two choices of a pipeline meet in some case, and leave the state of one device.

Choices are the model, the numbers of stages and of microbatches, the schedule, and what
the backward pass makes again. A greedy cover holds each pair that can be had at least
once: of the cases that can be had it takes one with most new pairs, of these the one
whose choices were made least.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import pytest

import autopar
from benchmarks.models import mlp

from .trainings import (
    Training,
    assert_trains_as_one_device,
    decoder,
    encoder_decoder,
    image_segmentation,
    perceptron,
)

BATCH, NUM_STEPS = 16, 2
MODELS: dict[str, Callable[[], Training]] = {
    "mlp": lambda: perceptron(mlp.Config(8, 16, BATCH)),
    "gpt": lambda: decoder(2, BATCH),
    "gpt_tied": lambda: decoder(2, BATCH, tied=True),
    "gpt_scanned": lambda: decoder(8, BATCH, scan_layers=True),
    "gpt_scanned_tied": lambda: decoder(8, BATCH, scan_layers=True, tied=True),
    "encoder_decoder": lambda: encoder_decoder(4, BATCH),
    "unet": lambda: image_segmentation(BATCH),
}


@dataclass(frozen=True)
class Case:
    """One choice of everything; prints as the name of its test."""

    model: str
    num_stages: int
    num_microbatches: int
    schedule: str
    remat: str

    def __str__(self) -> str:
        sizes = f"{self.num_stages}x{self.num_microbatches}"
        return f"{self.model}-{sizes}-{self.schedule}-{self.remat}"

    @property
    def num_submeshes(self) -> int:
        return self.num_stages // (2 if self.schedule == "interleaved" else 1)

    @property
    def can_be_had(self) -> bool:
        """Stages share submeshes two by two; one stage has no schedule."""
        if self.num_stages == 1:
            return self.schedule == "1f1b"
        if self.schedule != "interleaved":
            return True
        is_whole = self.num_stages % 2 == 0 and self.num_submeshes > 1
        return is_whole and self.num_microbatches % self.num_submeshes == 0

    @cached_property
    def values(self) -> tuple[tuple[int, Any], ...]:
        return tuple(enumerate(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def pairs(self) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(self.values, 2))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `parallelize`; devices are dealt out as far as they go."""
        if self.num_stages == 1:
            method = autopar.ShardParallel(self.num_microbatches)
            return {"method": method, "remat": self.remat}
        shape = f"x:{min(2, 8 // self.num_submeshes)}"
        method = autopar.PipelineParallel(
            self.num_stages,
            self.num_microbatches,
            self.schedule,
            stages_per_submesh=self.num_stages // self.num_submeshes,
            stage_meshes=[shape] * self.num_submeshes,
        )
        return {"method": method, "remat": self.remat}


def cover() -> Iterator[Case]:
    choices = itertools.product(
        MODELS,
        range(1, 9),
        (1, 2, 4, 8, 16),
        ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2"),
        ("none", "cheap", "full"),
    )
    possible = [case for case in itertools.starmap(Case, choices) if case.can_be_had]
    missing = {pair for case in possible for pair in case.pairs}
    used: Counter[tuple[int, Any]] = Counter()

    def gain(case: Case) -> tuple[int, int]:
        often = sum(used[value] for value in case.values)
        return len(case.pairs & missing), -often

    while missing:
        best = max(possible, key=gain)
        missing -= best.pairs
        used.update(best.values)
        yield best


CASES = tuple(cover())
QUICK = ("encoder_decoder-3x8-1f1b-cheap",)


def test_every_pair_is_met_in_about_sixty_cases() -> None:
    assert 56 <= len(CASES) <= 64
    assert set(QUICK) <= set(map(str, CASES))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_a_pipeline_leaves_the_state_of_the_full_batch(case: Case) -> None:
    assert_trains_as_one_device(MODELS[case.model](), NUM_STEPS, **case.options)
