"""The script of docs/how_to/ray.md, launched as the page says."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.ray.test_launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "ray.md"


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def test_examples_are_read_from_a_file_of_tokens(tmp_path: Path) -> None:
    tokens = np.arange(10 * 1024 + 1, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens")
    _, code = _blocks(PAGE.read_text())

    def step(state: jax.Array, batch: dict[str, jax.Array]) -> Any:
        return state + (batch["labels"] - batch["inputs"]).sum(), batch["inputs"].sum()

    like = jax.ShapeDtypeStruct((2, 1024), "i4")
    names: dict[str, Any] = {
        "autopar": autopar,
        "np": np,
        "step": autopar.parallelize(step),
        "state": jnp.zeros((), "i4"),
        "like": {"inputs": like, "labels": like},
    }
    code = code.replace("/data/tokens", str(tmp_path / "tokens"))
    exec(compile(code, PAGE.name, "exec"), names)
    assert names["state"] == 10 * 1024, "each label is the next input"


@pytest.mark.slow
def test_the_script_trains_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    script, _ = _blocks(text)
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
