"""The page on benchmarks: its file and its commands run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_to" / "benchmarks.md"
# One process, as each would import jax. What compares may find the machine busy.
RUN = """
import shlex, sys
from autopar.cli import main
for command in sys.argv[1:]:
    name, *args = shlex.split(command)
    assert name == "autopar"
    try:
        main(args)
    except SystemExit as end:
        assert end.code in (None, 0, args[1] == "compare"), command
"""


@pytest.mark.slow
def test_the_commands_run_on_the_file_that_is_shown(tmp_path: Path) -> None:
    page = PAGE.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    shells = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [line for shell in shells for line in shell.splitlines()]
    assert len(commands) == 6
    done = subprocess.run(
        [sys.executable, "-c", RUN, *commands],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("failed|refused", done.stdout), done.stdout
    text = (tmp_path / "step.html").read_text()
    assert "train:for_autopar x:8 own step" in text
    assert "numbers compared" in done.stdout


def test_every_suite_and_family_is_told() -> None:
    from benchmarks.models import names
    from benchmarks.suites import SUITES

    page = PAGE.read_text()
    for name in (*SUITES, *(name for name in names() if "-" not in name)):
        assert f"`{name}`" in page
