"""The walk-through of docs/change_one_thing.md runs as it stands, Python and shell."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from autopar.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "change_one_thing.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the page, in order."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the page's step in `train.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    first, _, _ = blocks("python")[0].partition("\nstep = ")
    target = "\n\ndef for_autopar():\n    return train_step, (params, batch)\n"
    (tmp_path / "train.py").write_text(first + target)
    return tmp_path


@pytest.mark.slow  # its commands are in test_explain_choice.py and test_plan_*.py
def test_the_python_blocks_and_then_those_of_the_shell_run_in_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "plan of train_step, for one step" in printed
    assert "the runner-up" in printed and "held by" in printed
    assert "from a plan of train_step to one of deeper_step" in printed
    assert (folder / "plan.json").exists()
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("autopar ")]
    assert len(commands) == 6
    for _, *arguments in commands:
        is_plain_plan = arguments[0] == "plan" and "--check" not in arguments
        extra = ["--no-compare"] if is_plain_plan else []
        with pytest.raises(SystemExit) as caught:
            main([*arguments, *extra])
        printed = capsys.readouterr()
        # The plan that was kept has a pin, and the one made by the check has none.
        is_refused = "--check" in arguments
        assert bool(caught.value.code) == is_refused, printed.err
        if "explain" in arguments:
            assert "the runner-up" in printed.out
        if "diff" in arguments or "--like" in arguments or is_refused:
            assert "from one plan of train_step to another" in printed.out
