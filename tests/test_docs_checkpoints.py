"""The Python blocks of docs/checkpoints.md run as they stand, in order."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.safetensors_file import read_safetensors

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"


@pytest.mark.slow  # what it shows is in test_checkpoints_kept.py and _export.py
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert len(blocks) == 6
    weights = read_safetensors(tmp_path / "model.safetensors")
    assert weights["up"].tobytes() == np.asarray(names["state"][0]["up"]).tobytes()
