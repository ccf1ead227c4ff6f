"""The script of docs/how_to/ray.md, launched as the page says."""

import re
import shlex
import sys
from pathlib import Path

import jax
import pytest

from tests.ray.test_launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "ray.md"


@pytest.mark.slow
def test_the_script_trains_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (command,) = re.findall(r"^autopar launch (.*)$", text, re.M)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    done = launch(*shlex.split(command), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"step \d on 2 hosts: ([\d.]+)", done.stdout)

    names: dict[str, object] = {}
    plain, _, _ = script.partition("\ncluster = ")
    exec(compile(plain, PAGE.name, "exec"), names)
    step, params = jax.jit(names["train_step"]), names["params"]  # pyright: ignore
    expected = []
    for _ in range(3):
        params, loss = step(params, names["batch"])
        expected.append(f"{float(loss):.4f}")
    assert losses == expected, sys.version
