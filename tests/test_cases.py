"""Steps that failed once, as whole scripts: each prints what is wrong and exits 0."""

import runpy
import warnings
from pathlib import Path

import pytest

CASES = sorted((Path(__file__).parent / "cases").glob("*.py"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        warnings.simplefilter("ignore")
        runpy.run_path(str(path))
    assert not end.value.code, capsys.readouterr().out
