"""Programs for GPUs beside those that plain jit makes of the same step."""

import sys
from math import inf

import pytest

from autopar.audit.program_figures import ProgramFigures
from benchmarks import compile_for
from benchmarks.beside_jit import ARGUMENTS, programs
from benchmarks.models import build
from benchmarks.step_time import OURS

pytestmark = pytest.mark.targets


def test_a_step_takes_and_sends_no_more_than_jit_with_its_shardings() -> None:
    made = programs(build("mlp", batch_size=512), "1x8xH100")
    found = {name: ProgramFigures.of(compiled(inf)) for name, compiled in made.items()}
    assert set(found) == {OURS, ARGUMENTS, "annotated", "data parallel"}
    ours, jit = found[OURS], found[ARGUMENTS]
    assert ours.device_bytes <= jit.device_bytes
    assert 0 < ours.sent_bytes <= jit.sent_bytes
    split = found["data parallel"].collectives
    assert {each.kind for each in split} == {"all_reduce"}


def test_the_table_has_a_row_for_each_method_and_says_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--models", "mlp", "--methods", "Zero(3)", "Megatron(5)"]
    monkeypatch.setattr(sys, "argv", ["compile_for", *asked])
    assert compile_for.main() == 0
    found = capsys.readouterr().out
    assert "| mlp | Zero(3) | 1x8xH100 |" in found
    assert "| ok |" in found
    assert "| mlp | Megatron(5) | 1x8xH100 | - | - | - | - | - | refused: " in found
