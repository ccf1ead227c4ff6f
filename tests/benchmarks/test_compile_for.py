"""A table of compiled plans says which collectives are none of its plan's."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from autopar.audit.audit import Audit, audit
from autopar.audit.program_figures import ProgramFigures
from autopar.audit.replay import Replay
from autopar.sharding.collective import Collective
from benchmarks import compile_for
from benchmarks.beside_jit import MODELS, why_worse
from benchmarks.compile_for import COMPILED

GROUPS = (tuple(range(8)),)
SUM = Collective("all_reduce", GROUPS, "float32", 800, 3, "sum", num_combined=2)
GATHER = Collective("all_gather", GROUPS, "float32", 800, is_async=True)


def measured(planned: Collective) -> Any:
    """In place of what is compiled: a program with one all_reduce."""

    def measure(*_: object) -> tuple[Audit, ProgramFigures]:
        found = audit([planned], [SUM], [SUM], num_devices=8, predicted_bytes=50)
        return found, ProgramFigures(100, (SUM, SUM), 1.0)

    return measure


@pytest.mark.parametrize(("planned", "code"), [(SUM, 0), (GATHER, 1)])
def test_a_wrong_audit_fails_and_is_told_in_words(
    planned: Collective,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compile_for, "measure", measured(planned))
    monkeypatch.setattr(sys, "argv", ["compile_for", "--models", "mlp"])
    assert compile_for.main() == code
    found = capsys.readouterr().out
    assert "| mlp | as planned | 1x8xH100 | 0.0 | 0.0 | 0.500 | 1 (0 async) |" in found
    wrong = "mlp by as planned for 1x8xH100: all_gather over all 8: planned"
    assert (wrong in found) == bool(code)


def test_bytes_sent_are_those_of_rings() -> None:
    assert ProgramFigures(0, (SUM,), 0).sent_bytes == pytest.approx(2 * 7 / 8 * 800 * 3)
    assert ProgramFigures(0, (SUM, GATHER), 0).sent_bytes == pytest.approx(4200 + 700)


def test_a_program_is_worse_if_it_takes_or_sends_more_as_printed() -> None:
    quiet = ProgramFigures(2_000_000, (), 0)
    assert not why_worse(quiet, quiet)
    assert not why_worse(replace(quiet, device_bytes=2_010_000), quiet)
    more = why_worse(replace(quiet, device_bytes=2_100_000), quiet)
    assert more == "takes 2,100,000 B, and 2,000,000 B by jit"
    large = replace(SUM, bytes=100_000)
    assert why_worse(replace(quiet, collectives=(large,)), quiet).startswith("sends")
    slower = replace(quiet, replayed=Replay(2e-4, 0.0, {"kernels": 2e-4}))
    assert why_worse(slower, quiet) == "takes 200,000 ns, and 0 ns by jit"


def test_thirteen_models_are_compiled_and_six_beside_jit() -> None:
    assert (len(COMPILED), len(MODELS)) == (13, 6)
